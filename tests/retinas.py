"""Retina-like pictures of three hospitals: vessels on a bright disc, 600 x 600 RGB; masks of 0 and 255, or of 1 bit."""

from pathlib import Path

import numpy as np
from PIL import Image as Pillow
from scipy.ndimage import gaussian_filter

CAMERAS = {  # colour of the background and of the vessels, noise
    "drive": ((200, 110, 50), (140, 50, 20), 6),
    "chase": ((150, 70, 40), (95, 25, 15), 4),
    "stare": ((225, 160, 90), (170, 95, 50), 9),
}


def picture(number: int, camera: str, side: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture and its mask."""
    rng = np.random.default_rng(number)
    back, vessel, noise = CAMERAS[camera]
    y, x = np.indices((side, side)) / side - 0.5
    disc = x**2 + y**2 < 0.23
    mask = np.zeros((side, side), bool)
    for _ in range(14):
        at, angle, width = rng.uniform(-0.15, 0.15, 2), rng.uniform(0, 2 * np.pi), rng.uniform(2.0, 6.0) * side / 600
        while np.hypot(*at) < 0.47 and width > 1:
            row, column = (int((v + 0.5) * side) for v in at)
            r = int(np.ceil(width))
            rows, columns = slice(max(0, row - r), row + r + 1), slice(max(0, column - r), column + r + 1)
            near = (y[rows, columns] - at[0]) ** 2 + (x[rows, columns] - at[1]) ** 2 < (width / side) ** 2
            mask[rows, columns] |= near
            angle += rng.normal(0, 0.08)
            at = at + 1.5 / side * np.array([np.sin(angle), np.cos(angle)])
            width *= 0.9992
    mask &= disc
    light = 1 - 0.8 * (x**2 + y**2) + 0.06 * gaussian_filter(rng.normal(size=(side, side)), 40) * 100
    soft = gaussian_filter(mask.astype(float), 0.8)[..., None]
    colours = (np.array(back) * (1 - soft) + np.array(vessel) * soft) * light[..., None]
    colours = (colours + rng.normal(0, noise, colours.shape)) * disc[..., None]
    return np.clip(colours, 0, 255).astype(np.uint8), mask


def write(root: Path, cases: int = 6, side: int = 600) -> Path:
    """Write the three hospitals, with masks of 0 and 255 (GIF, PNG) or of 1 bit."""
    for k, site in enumerate(CAMERAS):
        for folder in ("images", "masks"):
            (root / site / folder).mkdir(parents=True)
        for number in range(cases):
            image, mask = picture(100 * k + number, site, side)
            Pillow.fromarray(image).save(root / site / "images" / f"{number:02d}.png")
            end = "gif" if site == "drive" else "png"
            stored = Pillow.fromarray(mask) if site == "chase" else Pillow.fromarray(mask.astype(np.uint8) * 255)
            stored.save(root / site / "masks" / f"{number:02d}.{end}")
    return root
