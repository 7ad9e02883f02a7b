"""Pairs of images and label maps by their names: ``21_training.tif`` and ``21_manual1.gif`` are one case."""

import re
from collections.abc import Callable, Mapping, Sequence

IMAGES = re.compile(r"(.*[-_ ])?(images?|imgs?|imagestr|photos?|scans?)")
# folders of label maps, the likeliest first: a "mask" may be the field of view beside a "1st_manual"
TRUTHS = tuple(
    re.compile(pattern)
    for pattern in (
        r"1st[-_ ]?manual|manual[-_ ]?1?|labels[-_]ah",
        r"(.*[-_ ])?(ground[-_ ]?truths?|gts?|truths?)",
        r"(.*[-_ ])?labels?(tr)?|labels[-_]vk",
        r"(.*[-_ ])?(annotations?|segmentations?|segs?)",
        r"(.*[-_ ])?masks?",
    )
)
WORDS = "seg|label|mask|segmentation|labels|truth"
ENDINGS = re.compile(rf"{WORDS}|gt|groundtruth|manual|manual1|annotation|1st\w*|ah|lesion", re.IGNORECASE)


def rank(folder: str) -> int:
    """Return how likely a folder of this name holds label maps: 0 first; -1 for other folders.

    >>> rank("1st_manual"), rank("mask"), rank("images")
    (0, 4, -1)
    """
    return next((k for k, known in enumerate(TRUTHS) if known.fullmatch(folder.lower())), -1)


def match(images: Sequence[str], truths: Sequence[str]) -> dict[str, str]:
    """Return the label map of every image that has one, by name: by the rule that pairs most of them.

    >>> match(["21_training", "22_training"], ["21_manual1", "22_manual1"])
    {'21_training': '21_manual1', '22_training': '22_manual1'}
    """
    rules: tuple[Callable[[Sequence[str]], Mapping[str, str]], ...] = (
        lambda names: {n: n for n in names},
        lambda names: {re.sub(rf"[_-]({WORDS})$", "", n, flags=re.IGNORECASE): n for n in names},
        lambda names: _cases(names, front=False),
        lambda names: _cases(names, front=True),
    )
    best: dict[str, str] = {}
    for rule in rules:
        left, right = rule(images), rule(truths)
        pairs = {left[key]: right[key] for key in left if key in right}
        best = pairs if len(pairs) > len(best) else best
    return best


def in_one_folder(names: Sequence[str]) -> dict[str, str]:
    """Return the label map of every image in a folder of both: ``x.jpg`` and ``x_1stHO.png``.

    >>> in_one_folder(["a", "a_1stHO", "a_2ndHO", "b", "b_1stHO"])
    {'a': 'a_1stHO', 'b': 'b_1stHO'}
    """
    found: dict[str, str] = {}
    known = set(names)
    for name in names:
        for at in [m.start() for m in re.finditer(r"[_.-]", name)]:
            image, ending = name[:at], name[at + 1 :]
            if image in known and ENDINGS.fullmatch(ending):
                found.setdefault(image, name)
    return found


def _cases(names: Sequence[str], front: bool) -> dict[str, str]:
    """Return case -> name, without the words that all names end (and begin) with; nothing if cases are not unique."""
    words = [re.split(r"[_.\-\s]+", n.lower()) for n in names]
    while words and all(len(w) > 1 for w in words) and len({w[-1] for w in words}) == 1:
        words = [w[:-1] for w in words]
    while front and words and all(len(w) > 1 for w in words) and len({w[0] for w in words}) == 1:
        words = [w[1:] for w in words]
    cases = dict(zip(("_".join(w) for w in words), names, strict=True))
    return cases if len(cases) == len(names) else {}
