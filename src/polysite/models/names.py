"""Canonical names of the parameters of all networks, for patterns such as ``head.*``.

A network's own module names become ``stem``, ``encoder``, ``bottleneck``, ``decoder`` and ``head``; other modules keep
their names. A pattern then means the same in every algorithm and for every model. In a network with an encoder for
every class, the class comes next: ``encoder.class0.*`` is the encoder of the first class. The networks of an ensemble
have their names after ``members.0.``, ``members.1.``, ...

>>> canonical("upsamples.3.conv_block.conv1.conv.weight")
'decoder.3.conv_block.conv1.conv.weight'
>>> canonical("encoders.1.input_block.conv1.conv.weight")
'stem.class1.conv1.conv.weight'
>>> canonical("members.1.output_block.conv.conv.bias")
'members.1.head.conv.conv.bias'
"""

import re
from collections.abc import Iterable

from polysite.errors import ConfigError

PREFIXES = {
    "input_block.": "stem.",
    "downsamples.": "encoder.",
    "upsamples.": "decoder.",
    "supervision.": "decoder.supervision.",  # heads of coarser resolutions: they do not predict
    "output_block.": "head.",
    "features.conv0.": "stem.conv0.",
    "features.norm0.": "stem.norm0.",
    "features.": "encoder.",
    "class_layers.": "head.",
}
GROUPS = {g: f"{g}.*" for g in ("stem", "encoder", "bottleneck", "decoder", "head")}
MEMBER = re.compile(r"(members\.\d+\.)(.+)")  # inside a network of an ensemble
SUB_ENCODER = re.compile(r"encoders\.(\d+)(?:\.(.+))?")  # a class encoder, or a module inside it


def canonical(name: str) -> str:
    """Return the canonical name of a parameter or buffer of a network."""
    if member := MEMBER.fullmatch(name):
        return member[1] + canonical(member[2])
    if (inside := SUB_ENCODER.fullmatch(name)) and inside[2]:
        group, _, rest = canonical(inside[2]).partition(".")
        return f"{group}.class{inside[1]}.{rest}"
    return next((new + name[len(old) :] for old, new in PREFIXES.items() if name.startswith(old)), name)


def head_of(modules: Iterable[str]) -> str:
    """Return the module that computes the output of a network from its last features.

    >>> head_of(["", "input_block", "bottleneck", "output_block", "output_block.conv"])
    'output_block'
    """
    head = next((name for name in modules if name and canonical(f"{name}.") == "head."), None)
    if head is None:
        raise ConfigError("this network has no module called head, so it cannot have a personal head")
    return head


def deepest_of(modules: Iterable[str]) -> str:
    """Return the module that computes the deepest features: the bottleneck, or all layers before the classifier.

    >>> deepest_of(["", "input_block", "bottleneck", "bottleneck.conv1"])
    'bottleneck'
    """
    known = set(modules)
    deepest = next((name for name in ("bottleneck", "features") if name in known), None)
    if deepest is None:
        raise ConfigError("this network has no module called bottleneck or features, so features cannot be compared")
    return deepest


def sub_encoders_of(modules: Iterable[str]) -> list[str]:
    """Return the encoders of the classes, in the order of the classes.

    >>> sub_encoders_of(["", "encoders", "encoders.0", "encoders.0.bottleneck", "encoders.1", "bottleneck"])
    ['encoders.0', 'encoders.1']
    """
    encoders = [name for name in modules if (m := SUB_ENCODER.fullmatch(name)) and m[2] is None]
    if not encoders:
        raise ConfigError(
            "the divergence loss needs a network with an encoder for every class: model.name = 'unet_sub' or "
            "'densenet_sub'"
        )
    return encoders
