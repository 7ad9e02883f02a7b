"""Seconds an epoch of patches takes from polysite's cache, against MONAI's CacheDataset with the same transforms.

Both hold all prepared cases in memory; what is timed is one patch of every case: random crop, flips, noise, blur,
intensity scaling, contrast, and the batch itself. MONAI is given the best of no, one and two worker processes. Also:
how long each takes from the start of a program to its first batch, polysite with an empty and with a filled cache.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, set_track_meta
from monai.transforms import (
    Compose,
    ConcatItemsd,
    CropForegroundd,
    EnsureChannelFirstd,
    Lambdad,
    LoadImaged,
    NormalizeIntensityd,
    RandAdjustContrastd,
    RandFlipd,
    RandGaussianNoised,
    RandGaussianSmoothd,
    RandScaleIntensityd,
    RandSpatialCropd,
    SelectItemsd,
    SpatialPadd,
    ToTensord,
)

from polysite import config, study
from polysite.data.phantom import MODALITIES, write

LABELS = {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}
STUDY = """
[model]
filters = [4, 4, 4]
[split]
validation = 0.01
test = 0.0
[train]
device = "cpu"
[data]
name = "files"
[data.labels]
WT = [1, 2, 4]
TC = [1, 4]
ET = [4]
"""


def channels(label):
    return torch.cat([sum((label == v).float() for v in values) for values in LABELS.values()])


def monai(root: Path, names: list[str], patch: tuple[int, ...]) -> CacheDataset:
    both = ["image", "label"]
    files = [{m: str(root / f"{m}.nii.gz") for m in (*MODALITIES, "seg")} for root in sorted(root.glob("*/*"))]
    files = [f for f in files if Path(f["seg"]).parent.name in names]
    steps = [
        LoadImaged(keys=[*MODALITIES, "seg"], dtype=np.float32),
        EnsureChannelFirstd(keys=[*MODALITIES, "seg"], channel_dim="no_channel"),
        ConcatItemsd(keys=MODALITIES, name="image"),
        Lambdad(keys="seg", func=channels),
        ConcatItemsd(keys=["seg"], name="label"),
        SelectItemsd(keys=both),
        CropForegroundd(keys=both, source_key="image", select_fn=lambda x: x != 0),
        NormalizeIntensityd(keys="image", nonzero=True, channel_wise=True),
        SpatialPadd(keys=both, spatial_size=patch),
        ToTensord(keys=both, track_meta=False),
        RandSpatialCropd(keys=both, roi_size=patch, random_size=False),
        *(RandFlipd(keys=both, prob=0.5, spatial_axis=a) for a in range(3)),
        RandGaussianNoised(keys="image", prob=0.15, std=0.25, sample_std=False),
        RandGaussianSmoothd(keys="image", prob=0.15, sigma_x=(0.5, 1.0), sigma_y=(0.5, 1.0), sigma_z=(0.5, 1.0)),
        RandScaleIntensityd(keys="image", prob=0.15, factors=0.3),
        RandAdjustContrastd(keys="image", prob=0.3, gamma=(0.5, 2.0)),
    ]
    return CacheDataset(files, Compose(steps), num_workers=2, progress=False)


def epoch(batches: Iterable) -> float:
    began, seen = time.perf_counter(), 0
    for batch in batches:
        seen += len(batch[0] if isinstance(batch, tuple) else batch["image"])
    assert seen
    return time.perf_counter() - began


def timed(make: Callable) -> tuple[float, object]:
    began = time.perf_counter()
    made = make()
    return time.perf_counter() - began, made


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--side", type=int, default=144, help="of the volumes")
    words.add_argument("--patch", type=int, default=128)
    words.add_argument("--cases", type=int, default=12)
    words.add_argument("--epochs", type=int, default=7)
    given = words.parse_args()
    warnings.simplefilter("ignore")
    set_track_meta(False)
    patch = (given.patch,) * 3
    with tempfile.TemporaryDirectory() as place:
        os.environ["POLYSITE_CACHE"] = f"{place}/cache"
        phantom = {"data.shape": str([given.side] * 3), "data.sites": f"{{one={{cases={given.cases + 1}}}}}"}
        drawn = config.parse("[split]\ntest = 0.0", phantom)
        write((p.open() for p in drawn.data.case_refs(0)["one"]), Path(place) / "data")
        ours = config.parse(STUDY, {"data.path": f"{place}/data", "train.patch": str(list(patch))})
        cold, _ = timed(lambda: study.build_sites(ours))
        warm, sites = timed(lambda: study.build_sites(ours))
        site = sites["one"]
        theirs, dataset = timed(lambda: monai(Path(place) / "data", list(site.cases("train")), patch))
        assert len(dataset) == site.size
        loaders = {
            k: DataLoader(dataset, batch_size=4, shuffle=True, num_workers=k, persistent_workers=k > 0)
            for k in (0, 1, 2)
        }
        mine, best = [], {k: [] for k in loaders}
        for round in range(given.epochs + 1):
            mine.append(epoch(site.at(round)._batches((1, None), None)))
            for k, loader in loaders.items():
                best[k].append(epoch(loader))
    ours_s = statistics.median(mine[1:])
    reference = {k: statistics.median(v[1:]) for k, v in best.items()}
    fastest = min(reference, key=reference.__getitem__)
    sizes = f"{site.size} cases of {given.side}^3 x 4, patches {given.patch}^3"
    print(f"{sizes}, augmented, batch 4, {torch.get_num_threads()} threads")
    print(f"polysite            {ours_s:.3f} s an epoch ({min(mine[1:]):.3f} to {max(mine[1:]):.3f})")
    for k, seconds in reference.items():
        print(f"MONAI, {k} workers    {seconds:.3f} s an epoch ({min(best[k][1:]):.3f} to {max(best[k][1:]):.3f})")
    print(f"ratio               {reference[fastest] / ours_s:.2f} (MONAI's best / polysite; target: at least 3)")
    print(f"to the first patch  polysite {cold:.1f} s, from its cache {warm:.2f} s; MONAI {theirs:.1f} s every time")


if __name__ == "__main__":
    main()
