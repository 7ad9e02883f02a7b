"""Scans to look at: left and right are marked only where the files state them."""

import nibabel
import numpy as np
import pytest

from polysite.data.files import Files
from polysite.report.preview import axes_of
from polysite.report.scans import is_oriented, upright_scan


def ref(folder, suffix, spacing=""):
    """A case in a manifest, as a file of this kind."""
    volume, label = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6), np.ones((4, 5, 6), np.uint8)
    for name, array in (("t1", volume), ("seg", label)):
        if suffix == ".npy":
            np.save(folder / f"{name}.npy", array)
        else:
            image = nibabel.Nifti1Image(array, np.diag([1.0, 1.0, 2.0, 1.0]))
            image.header.set_xyzt_units("mm")
            nibabel.save(image, folder / f"{name}{suffix}")
    (folder / "manifest.csv").write_text(
        f"site,case,t1,label,labels,spacing\nnorth,n01,t1{suffix},seg{suffix},a=1,{spacing}\n"
    )
    return Files(path=str(folder / "manifest.csv")).case_refs(0)["north"][0]


@pytest.mark.parametrize(("suffix", "spacing", "sides"), [(".nii.gz", "", True), (".npy", "1 1 2", False)])
def test_sides_are_known_only_from_files_that_state_them(tmp_path, suffix, spacing, sides):
    found = ref(tmp_path, suffix, spacing)
    case = found.open()
    scan = upright_scan(case, axes_of(case), is_oriented(found))
    assert case.unit == "mm" and scan.crop["sides"] is sides
    assert scan.crop["depth"] == 2.0 and scan.crop["pixel"] == [1.0, 1.0]
