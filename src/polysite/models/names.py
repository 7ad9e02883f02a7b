"""One naming for the parameters of every network, so that an algorithm can say "the head stays here".

A network's own module names become ``stem``, ``encoder``, ``bottleneck``, ``decoder`` and ``head``; what is none of
these keeps its name. Patterns such as ``head.*`` then mean the same thing in every algorithm and for every model.

>>> canonical("upsamples.3.conv_block.conv1.conv.weight")
'decoder.3.conv_block.conv1.conv.weight'
"""

from collections.abc import Iterable

from polysite.errors import ConfigError

PREFIXES = {
    "input_block.": "stem.",
    "downsamples.": "encoder.",
    "upsamples.": "decoder.",
    "output_block.": "head.",
    "features.conv0.": "stem.conv0.",
    "features.norm0.": "stem.norm0.",
    "features.": "encoder.",
    "class_layers.": "head.",
}
GROUPS = {g: f"{g}.*" for g in ("stem", "encoder", "bottleneck", "decoder", "head")}


def canonical(name: str) -> str:
    """polysite's name for a parameter or buffer of a network."""
    return next((new + name[len(old) :] for old, new in PREFIXES.items() if name.startswith(old)), name)


def deepest_of(modules: Iterable[str]) -> str:
    """The module whose output is the deepest features of a network: the bottleneck, or all before the classifier.

    >>> deepest_of(["", "input_block", "bottleneck", "bottleneck.conv1"])
    'bottleneck'
    """
    known = set(modules)
    found = next((name for name in ("bottleneck", "features") if name in known), None)
    if found is None:
        raise ConfigError("this network has no part called bottleneck or features, whose output could be compared")
    return found
