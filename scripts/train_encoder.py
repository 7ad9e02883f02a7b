"""Make the weights of the encoder that ships with polysite, from drawn phantoms alone.

Draws cases whose scanners, contrasts and tumours vary more than those of any federation here, shows the network one
modality at a time, and asks for two things: the three tumour labels, and how the case was made (the contrasts of the
tissues in this modality, intensity curve, coil, noise, slices, size of the tumour), the latter from the spread of every
feature over the volume. So the features have to hold both what a scan shows and how it was taken. They are the last
that both readers see, and both readers are thrown away. What is written is checked on cases never trained on.

    python scripts/train_encoder.py --out encoder.safetensors --device cuda
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import nn

from polysite.data.phantom import CODE, LABELS, MODALITIES, Hospital, _contrasts, draw
from polysite.models.small_encoder import CHANNELS, SmallEncoder

Triple = tuple[np.ndarray, np.ndarray, np.ndarray]  # modalities, labels, and how each modality was made


def main() -> None:
    given = _options()
    began = time.perf_counter()
    if given.out.exists():
        raise SystemExit(f"{given.out} exists; move it away or name another file")
    crop = min(given.sides)
    cases = _draw_all(given)
    print(f"{len(cases)} cases drawn after {time.perf_counter() - began:.0f} s", flush=True)
    held = max(1, len(cases) // 20)
    known, unknown = Cases(cases[held:], crop, given.device), Cases(cases[:held], crop, given.device)
    torch.manual_seed(given.seed)
    encoder, decoder = SmallEncoder().to(given.device), _decoder().to(given.device)
    teller = _teller(known.makings.shape[-1]).to(given.device)
    train(encoder, decoder, teller, known, given)
    save(encoder, given)
    encoder.load_state_dict(
        safetensors.torch.load_file(given.out), strict=False
    )  # the rounded weights are the ones that count
    encoder.eval(), decoder.eval(), teller.eval()
    scores = dice_of_held_out(encoder, decoder, unknown)
    told = told_of_held_out(encoder, teller, unknown, known)
    print(
        f"how a case was made, share of the variance that is told: {told.mean():.2f}; by part {told.round(2).tolist()}"
    )
    print(f"held-out Dice over {held} cases: {scores.mean():.3f}")
    for modality, row in zip(MODALITIES, scores, strict=True):
        print(f"  {modality:6}" + "  ".join(f"{label} {x:.3f}" for label, x in zip(LABELS, row, strict=True)))
    print(f"{given.out}: {given.out.stat().st_size:,} bytes after {time.perf_counter() - began:.0f} s")


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=1500, help="phantoms; every twentieth is held out")
    options.add_argument("--sides", type=int, nargs="+", default=[48, 56, 64], help="voxels; crops have the smallest")
    options.add_argument("--steps", type=int, default=4000)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--rate", type=float, default=2e-3, help="of learning, at its highest")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--workers", type=int, default=None, help="processes that draw; default: one per core")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", type=Path, default=Path("encoder.safetensors"))
    return options.parse_args()


def _draw_all(given: argparse.Namespace) -> list[Triple]:
    # forked before torch computes anything, so that no worker has to import it again
    with get_context("fork").Pool(given.workers) as pool:
        one = partial(draw_one, sides=given.sides, seed=given.seed)
        return list(pool.imap(one, range(given.cases), chunksize=4))


def draw_one(index: int, sides: Sequence[int], seed: int) -> Triple:
    """One patient of a hospital of its own: z-scored modalities in half precision, labels, how it was made."""
    random = np.random.default_rng([seed, index])
    hospital = Hospital(
        scanner=int(random.integers(1, 10**6)),
        contrast=random.uniform(0, 1),
        gamma=random.uniform(0.6, 1.5),
        bias=random.uniform(0, 0.5),
        noise=random.uniform(0.01, 0.1),
        thickness=float(random.choice([1, 2, 3])),
        tumour=random.uniform(0.6, 1.4),
        low_grade=0.3,
    )
    side = int(random.choice(sides))
    case = draw(hospital, site="encoder", index=index, seed=seed, shape=(side, side, side))
    images = np.stack([_normalised(modality) for modality in case.image]).astype(np.float16)
    contrasts = hospital.gamma * np.log(_contrasts(hospital.scanner, hospital.contrast)[CODE["fluid"] :]).T
    rest = [hospital.gamma, hospital.bias, np.log(hospital.noise), hospital.thickness, hospital.tumour]
    return images, case.label, np.hstack([contrasts, np.tile(rest, (len(MODALITIES), 1))]).astype(np.float32)


def _normalised(modality: np.ndarray) -> np.ndarray:
    """The z-score over voxels that are not zero, as ``polysite.data.prepare`` makes it."""
    inside = modality != 0
    values = modality[inside]
    return np.where(inside, (modality - values.mean()) / values.std(), 0)


class Cases:
    """Cases on the device, cut to equal crops."""

    def __init__(self, cases: Sequence[Triple], crop: int, device: str):
        self.images = [torch.from_numpy(image).to(device) for image, _, _ in cases]
        self.labels = [torch.from_numpy(label).to(device) for _, label, _ in cases]
        self.makings = torch.from_numpy(np.stack([making for _, _, making in cases])).to(device)
        self.crop = crop

    @property
    def usual(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean and the deviation of every number that says how a case was made."""
        return self.makings.mean((0, 1)), self.makings.std((0, 1)).clamp(min=1e-3)  # that of white matter never varies

    def sample(self, random: np.random.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random crops of random modalities of random cases, flipped at random."""
        images, labels, makings = [], [], []
        for k in random.integers(len(self.images), size=count):
            room = self.images[k].shape[-1] - self.crop
            box = self._box(random.integers(room + 1, size=3))
            axes = [axis + 1 for axis in range(3) if random.random() < 0.5]
            modality = int(random.integers(len(MODALITIES)))
            images.append(self.images[k][modality : modality + 1, *box].flip(axes))
            labels.append(self.labels[k][:, *box].flip(axes))
            makings.append(self.makings[k, modality])
        return torch.stack(images).float(), torch.stack(labels).float(), torch.stack(makings)

    def middles(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The middle of every case, its modalities as a batch."""
        for image, label in zip(self.images, self.labels, strict=True):
            box = self._box([(image.shape[-1] - self.crop) // 2] * 3)
            yield image[:, None, *box].float(), label[None, :, *box].float()

    def _box(self, start: Sequence[int] | np.ndarray) -> tuple[slice, ...]:
        return tuple(slice(int(a), int(a) + self.crop) for a in start)


def _decoder() -> nn.Sequential:
    """Back to full size in three doublings; no short cuts from the early levels."""
    *rest, last = CHANNELS
    layers: list[nn.Module] = []
    for channels in reversed(rest):
        double = nn.ConvTranspose3d(last, channels, 2, stride=2, bias=False)
        layers += [double, nn.InstanceNorm3d(channels), nn.LeakyReLU(0.01, inplace=True)]
        last = channels
    return nn.Sequential(*layers, nn.Conv3d(last, len(LABELS), 1))


def _teller(numbers: int) -> nn.Sequential:
    """From the spread of every feature to how the case was made."""
    return nn.Sequential(nn.Linear(CHANNELS[-1], 128), nn.LeakyReLU(0.01), nn.Linear(128, numbers))


def spread(features: torch.Tensor) -> torch.Tensor:
    return features.float().flatten(2).std(2)


def train(encoder: nn.Module, decoder: nn.Module, teller: nn.Module, cases: Cases, given: argparse.Namespace) -> None:
    random, began = np.random.default_rng(given.seed), time.perf_counter()
    weights = [*encoder.parameters(), *decoder.parameters(), *teller.parameters()]
    usual, width = cases.usual
    optimiser = torch.optim.Adam(weights, given.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, given.rate, total_steps=given.steps, pct_start=0.1)
    for step in range(1, given.steps + 1):
        images, labels, makings = cases.sample(random, given.batch)
        with torch.autocast("cuda", torch.bfloat16, enabled=images.is_cuda):
            features = encoder(images)
            logits = decoder(features).float()
        overlap = dice(logits.sigmoid(), labels).mean()
        told = nn.functional.mse_loss(teller(spread(features)), (makings - usual) / width)
        loss = 1 - overlap + nn.functional.binary_cross_entropy_with_logits(logits, labels) + told
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % max(1, given.steps // 20) == 0:
            seconds = time.perf_counter() - began
            print(f"step {step}  loss {loss:.3f}  Dice {overlap:.3f}  told {told:.3f}  {seconds:.0f} s", flush=True)


def dice(drawn: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """(case, label): twice the common part over the sum of both; one where both are empty."""
    common, both = (drawn * truth).flatten(2).sum(2), (drawn + truth).flatten(2).sum(2)
    return (2 * common + 1) / (both + 1)


def save(encoder: nn.Module, given: argparse.Namespace) -> None:
    """In half precision; one entry of metadata, since the order of several is not the same in every process."""
    sides, rate = " ".join(map(str, given.sides)), f"--rate {given.rate} --seed {given.seed}"
    how = f"train_encoder.py --cases {given.cases} --sides {sides} --steps {given.steps} --batch {given.batch} {rate}"
    halves = {k: v.detach().half().cpu().contiguous() for k, v in encoder.state_dict().items() if v.is_floating_point()}
    safetensors.torch.save_file(halves, given.out, metadata={"polysite": how})


@torch.no_grad()
def dice_of_held_out(encoder: nn.Module, decoder: nn.Module, cases: Cases) -> np.ndarray:
    """(modality, label): the mean over cases."""
    scores = [dice((decoder(encoder(images)) > 0).float(), label) for images, label in cases.middles()]
    return torch.stack(scores).mean(0).cpu().numpy()


@torch.no_grad()
def told_of_held_out(encoder: nn.Module, teller: nn.Module, cases: Cases, known: Cases) -> np.ndarray:
    """One minus the mean squared error, in units of the variance."""
    usual, width = known.usual
    guesses = torch.stack([teller(spread(encoder(images))) for images, _ in cases.middles()])
    return (1 - (guesses - (cases.makings - usual) / width).square().mean((0, 1))).cpu().numpy()


if __name__ == "__main__":
    main()
