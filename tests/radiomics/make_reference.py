"""Write reference.json: what PyRadiomics 3.0.1 makes of the volumes. Runs where PyRadiomics is installed:

    python3.11 -m venv oracle
    oracle/bin/pip install 'numpy<2' setuptools wheel SimpleITK PyWavelets pykwalify six nibabel
    oracle/bin/pip install --no-build-isolation --no-deps pyradiomics==3.0.1
    oracle/bin/python tests/radiomics/make_reference.py

The real case is added where ../shared/data lies beside the repository, and left as it is where not.
"""

import json
import logging
import warnings
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
FAMILIES = ("firstorder", "glcm", "gldm", "glrlm", "glszm", "ngtdm")


def reference(volume) -> dict[str, float]:
    import SimpleITK
    from radiomics.featureextractor import RadiomicsFeatureExtractor

    # it refuses a mask without background ("no labels found"), so that all get a rim of it
    pair = [SimpleITK.GetImageFromArray(np.pad(a, 1)) for a in (volume.image, volume.mask.astype(np.int32))]
    for each in pair:
        each.SetSpacing([float(s) for s in volume.spacing[::-1]])
    extractor = RadiomicsFeatureExtractor(**volume.options)
    extractor.disableAllFeatures()
    for family in FAMILIES:
        extractor.enableFeatureClassByName(family)
    found = extractor.execute(*pair)
    return {name.removeprefix("original_"): float(v) for name, v in found.items() if name.startswith("original_")}


def main() -> None:
    from volumes import real, volumes

    logging.getLogger("radiomics").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    path = HERE / "reference.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    shared = HERE.parents[2] / "shared" / "data"
    cases = volumes() | (real(shared) if shared.is_dir() else {})
    found |= {name: reference(volume) for name, volume in cases.items()}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{path}: {len(found)} volumes, {sum(map(len, found.values()))} numbers")


if __name__ == "__main__":
    main()
