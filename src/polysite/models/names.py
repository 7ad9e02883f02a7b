"""One naming for the parameters of every network, so that an algorithm can say "the head stays here".

A network's own module names become ``stem``, ``encoder``, ``bottleneck``, ``decoder`` and ``head``; what is none of
these keeps its name. Patterns such as ``head.*`` then mean the same thing in every algorithm and for every model.
Where a network has an encoder for every class, the class comes next: ``encoder.class0.*`` is the one of the first.

>>> canonical("upsamples.3.conv_block.conv1.conv.weight")
'decoder.3.conv_block.conv1.conv.weight'
>>> canonical("encoders.1.input_block.conv1.conv.weight")
'stem.class1.conv1.conv.weight'
"""

import re
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
SUB_ENCODER = re.compile(r"encoders\.(\d+)(?:\.(.+))?")  # a module, or something inside


def canonical(name: str) -> str:
    """polysite's name for a parameter or buffer of a network."""
    if (inside := SUB_ENCODER.fullmatch(name)) and inside[2]:
        group, _, rest = canonical(inside[2]).partition(".")
        return f"{group}.class{inside[1]}.{rest}"
    return next((new + name[len(old) :] for old, new in PREFIXES.items() if name.startswith(old)), name)


def head_of(modules: Iterable[str]) -> str:
    """The module that makes the answer of a network from its last features.

    >>> head_of(["", "input_block", "bottleneck", "output_block", "output_block.conv"])
    'output_block'
    """
    found = next((name for name in modules if name and canonical(f"{name}.") == "head."), None)
    if found is None:
        raise ConfigError("this network has no part called head, so none can be set beside it")
    return found


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


def sub_encoders_of(modules: Iterable[str]) -> list[str]:
    """The modules that are the encoders of the classes, in their order.

    >>> sub_encoders_of(["", "encoders", "encoders.0", "encoders.0.bottleneck", "encoders.1", "bottleneck"])
    ['encoders.0', 'encoders.1']
    """
    found = [name for name in modules if (m := SUB_ENCODER.fullmatch(name)) and m[2] is None]
    if not found:
        raise ConfigError(
            "the divergence loss needs a network with an encoder for every class: model.name = 'unet_sub' or "
            "'densenet_sub'"
        )
    return found
