"""`polysite predict` on volumes of 240 x 240 x 155, four modalities, against the network's own forward passes.

Both sides see the same windows in batches of the same size, on a CPU. On polysite's side: preparation (crop, z-scores),
windows, their weighted sum, masks, and the way back to the grid of the scan. Reading and writing of files is in
neither. The reference passes ready-made windows through the network alone. Volume by volume the two take turns; the
ratio is that of processor time, which other processes on the machine change less than the clock, and is also given to
the time that the network takes within the prediction, where both saw the same neighbours. The masks are compared with
MONAI's sliding window on the first volume.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
from monai.inferers.utils import sliding_window_inference
from scipy.ndimage import gaussian_filter

import polysite as ps
from polysite.data.case import Case
from polysite.prediction import Predictor

SHAPE, MODALITIES = (240, 240, 155), 4


def volume(number: int) -> Case:
    """Return a head of smooth noise; outside of it all voxels are zero, as in BraTS."""
    rng = np.random.default_rng(number)
    at = np.indices(SHAPE, np.float32)
    centre, radii = np.array(SHAPE) / 2, np.array((70, 86, 70)) * rng.uniform(0.95, 1.05, 3)
    head = sum(((x - c) / r) ** 2 for x, c, r in zip(at, centre, radii, strict=True)) < 1
    smooth = [gaussian_filter(rng.normal(size=SHAPE).astype(np.float32), 2) for _ in range(MODALITIES)]
    image = np.stack([head * (300 + 900 * s) for s in smooth]).astype(np.float32)
    return Case("north", f"volume-{number}", image, np.zeros(0, np.uint8), (1.0, 1.0, 1.0), affine=np.eye(4))


def run(folder: Path, filters: tuple[int, ...], window: int) -> Path:
    """Train a network for one step and return its run folder: what it predicts does not matter here."""
    study = ps.Study(
        model=ps.UNet(filters=filters),
        data=ps.Phantom(shape=(24, 24, 24), sites={"north": ps.Hospital(cases=4), "south": ps.Hospital(cases=4)}),
        train=ps.Train(patch=(24, 24, 24), window=(window,) * 3, steps=1, device="cpu", augment="none"),
        run=ps.Plan(rounds=1),
    )
    return ps.train(study, folder / "run", evaluate=False).folder.path


def windows(predictor: Predictor, image: np.ndarray) -> list[torch.Tensor]:
    """Return the batches of windows that the network sees, ready-made."""
    seen: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return torch.zeros(len(x), 1, *x.shape[2:])

    from polysite.training.predict import windowed

    list(windowed(note, [("", torch.from_numpy(image))], predictor.window, predictor.overlap, predictor.batch))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--volumes", type=int, default=10)
    parser.add_argument("--filters", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as place:
        predictor = Predictor(run(Path(place), tuple(given.filters), given.window), device="cpu")
    ours, theirs, inside, network = [], [], [], predictor.networks[0].infer

    def timed(x: torch.Tensor) -> torch.Tensor:
        began = time.process_time()
        logits = network(x)
        inside[-1] += time.process_time() - began
        return logits

    predictor.networks[0].infer = timed  # type: ignore[method-assign]
    for number in range(given.volumes):
        case = volume(number)
        inside.append(0.0)
        began = time.process_time()
        prepared, at = predictor.prepared(case)
        found = predictor.predict(prepared, at)
        ours.append(time.process_time() - began)
        batches = windows(predictor, prepared.image)
        began = time.process_time()
        with torch.inference_mode():
            for batch in batches:
                network(batch)
        theirs.append(time.process_time() - began)
        count, size = sum(map(len, batches)), predictor.batch
        if not number:
            print(
                f"{count} windows of {given.window}³, {size} per pass, image {prepared.image.shape[1:]} after its crop"
            )
            same(predictor, prepared, at, found.masks)
        print(
            f"volume {number}: predict {ours[-1]:.1f} s, forward passes {theirs[-1]:.1f} s, {ours[-1] / theirs[-1]:.3f}"
        )
    print(
        f"ratio {sum(ours) / sum(theirs):.3f} (target 1.2); to the network's time within: {sum(ours) / sum(inside):.3f}"
    )


def same(predictor: Predictor, prepared: Case, at: object, masks: np.ndarray) -> None:
    """Compare with MONAI's sliding window; a logit within rounding of zero may differ."""
    with torch.inference_mode():
        image = torch.from_numpy(prepared.image)[None]
        size, network = predictor.batch, predictor.networks[0]
        logits = sliding_window_inference(image, predictor.window, size, network, predictor.overlap, mode="gaussian")
    odd = np.mean(at.restore((logits[0] > 0).numpy()) != masks)  # type: ignore[attr-defined]
    print(f"voxels that MONAI's sliding window decides otherwise: {odd:.1e}")
    assert odd < 1e-5 and masks.shape[1:] == SHAPE


if __name__ == "__main__":
    main()
