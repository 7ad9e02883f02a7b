"""What a folder holds that no layout fits, in words, and how to go on."""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from polysite.data import pairing
from polysite.data.images import is_image, suffix, what_is_read
from polysite.data.manifest import Row, natural
from polysite.data.tables import SPLITS
from polysite.errors import PolysiteError

MAX_FILES = 20_000  # that are counted
MAX_FOLDERS = 20  # below the root that are tried


def describe(root: Path, layouts: Mapping[str, Callable[[Path], list[Row]]]) -> str:
    """Return the sentence for a folder that no layout fits: what was seen, the nearest layout, how to go on."""
    folders = _folders(root)
    kinds = Counter(kind for files in folders.values() for kind in files.elements())
    if not kinds:
        return f"{root} holds no dataset of a known layout, and no file at all; name the folder that holds the dataset"
    counts = [f"{n} {kind or 'files without a suffix'}" for kind, n in kinds.most_common(3)]
    some = natural(f for f in folders if f) or ["the folder itself"]
    where = ", ".join(some[:4]) + ", …" * (len(some) > 4)
    found = f"{root} holds no dataset of a known layout: {' and '.join(counts)} in {where}"
    if not any(is_image(f"x{kind}") for kind in kinds):
        return f"{found}, none of which is read; convert them: polysite reads {what_is_read()}"
    hint = _elsewhere(root, layouts)
    if hint:
        return f"{found}; {hint}"
    name = _nearest(root, folders)
    doc = (layouts[name].__doc__ or "").strip().rstrip(".")
    return (
        f"{found}; nearest layout: {name}, which looks for {doc}. Rename folders and files to fit it ('polysite data "
        "formats' lists all layouts), or write a manifest with the columns site, case, image, label, labels. Scans to "
        f"predict need neither: 'polysite predict RUN {root.name}'"
    )


def _folders(root: Path) -> dict[str, Counter[str]]:
    """Return how many files of every suffix lie in every folder; hidden ones are skipped."""
    folders: dict[str, Counter[str]] = {}
    count = 0
    for above, below, files in os.walk(root):
        below[:] = natural(n for n in below if not n.startswith((".", "__")))
        seen = [suffix(n) or PurePosixPath(n).suffix.lower() for n in files if not n.startswith(".")]
        count += len(seen)
        if seen:
            folders[os.path.relpath(above, root).replace(os.sep, "/").removeprefix(".")] = Counter(seen)
        if count > MAX_FILES:
            break
    return folders


def _elsewhere(root: Path, layouts: Mapping[str, Callable[[Path], list[Row]]]) -> str:
    """Return a hint at a folder below or above that is a dataset."""
    below = [e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith(".")]
    for name in natural(below)[:MAX_FOLDERS]:
        for layout, rows in layouts.items():
            with suppress(PolysiteError, OSError):
                if rows(root / name):
                    return f"its folder {name} is a dataset of the layout {layout}: name {root / name}"
    own = root.name.lower()
    if own in SPLITS or pairing.IMAGES.fullmatch(own) or pairing.rank(own) >= 0 or re.fullmatch(r"subset\d", own):
        return f"it looks like a part of a dataset: name the folder above it, {root.parent}"
    return ""


def _nearest(root: Path, folders: Mapping[str, Counter[str]]) -> str:
    """Return the layout whose folders are most like these."""
    names = {part.lower() for folder in folders for part in folder.split("/")}
    if (root / "dataset.json").exists() or "imagestr" in names:
        return "nnunet"
    if any(n.startswith("sub-") for n in names):
        return "bids"
    if any(pairing.IMAGES.fullmatch(n) or pairing.rank(n) >= 0 for n in names) or set(folders) == {""}:
        return "pairs"
    return "tree"
