"""FedBN: federated averaging of all parameters but those of normalisation layers, which stay at each site.

Paper: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021, Algorithm 1

    (u_k, v_k) <- fit_k(u, v_k)    all layers together,    u <- sum_k p_k u_k,    p_k = n_k / sum_j n_j

v_k are the scale, shift and running statistics of every normalisation layer; they stay at site k. u are all other
parameters. A layer is taken for a normalisation layer if it has running statistics, or a weight with the shape of its
bias (batch, instance, group and layer normalisation; a scale without a shift cannot be distinguished from the parameter
of an activation). The networks unet and unet_small normalise without scale, shift and statistics, so with them FedBN
equals FedAvg bit for bit. The paper gives all sites the same weight (uniform = true). A site that never trained is
served u and the initial v; the paper serves it the mean of all v_k, but here no v_k leaves its site.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel, State
from polysite.algorithms.base import Facts
from polysite.algorithms.partial_models import layer
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site
from polysite.tree import Tree


@dataclass(frozen=True)
class FedBN(OneModel):
    """Federated averaging of all parameters but those of normalisation layers.

    Args:
        uniform: Whether all sites have the same weight, p_k = 1/K, as in the paper, instead of p_k = n_k/N.
    """

    uniform: bool = False

    facts: ClassVar[Facts] = Facts(needs="sum")

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(_rest(params))

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        model = site.fit(_whole(got, memory, site)).params
        weight = 1 if self.uniform else site.size
        return Payload(model=_rest(model), weight=weight), Payload(private=normalisation(model))

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield _whole(got, memory, site), cases


def _whole(got: Payload, memory: Payload, site: Site) -> Tree:
    """Return the model of a site: the received parameters with its own normalisation."""
    return {**got["model"], **memory.get("private", normalisation(site.start))}


def _rest(model: Tree) -> Tree:
    own = normalisation(model)
    return {k: v for k, v in model.items() if k not in own}


def normalisation(model: Tree) -> Tree:
    """Return the parameters and running statistics of the normalisation layers of a model.

    A layer is one of them if it has running statistics, or a weight with as many axes as its bias (a kernel has more).

    >>> import numpy as np
    >>> shapes = {"conv.weight": (8, 4, 3, 3), "conv.bias": (8,), "shortcut.1.weight": (8,), "shortcut.1.bias": (8,)}
    >>> tuple(normalisation({k: np.zeros(v) for k, v in shapes.items()}))
    ('shortcut.1.weight', 'shortcut.1.bias')
    """
    layers = {layer(k) for k in tree.statistics(model)}
    for name, weight in tree.select(model, ["*.weight", "weight"]).items():
        bias = model.get(name.removesuffix("weight") + "bias")
        if bias is not None and len(weight.shape) == len(bias.shape):
            layers.add(layer(name))
    return {k: v for k, v in model.items() if layer(k) in layers}
