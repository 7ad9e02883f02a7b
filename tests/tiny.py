"""A hospital with a few small random volumes and a tiny network."""

import numpy as np

from polysite.data.case import Case
from polysite.models.densenet import DenseNet
from polysite.models.unet import UNet
from polysite.training.network import Network
from polysite.training.settings import Train
from polysite.training.torch_site import TorchSite

PLAIN = Train(lr=0.05, gamma=1.0, weight_decay=0.0, patch=(8, 8, 8), augment="none", batch=2, device="cpu")
TINY_UNET, TINY_DENSENET = UNet(filters=(4, 8, 8)), DenseNet(blocks=(2, 2), growth=4, features=8)


def cases(n, seed=0, site="s"):
    """Two modalities, and a label where the first is bright."""
    rng = np.random.default_rng(seed)
    image = [rng.normal(size=(2, 10, 9, 8)).astype(np.float32) for _ in range(n)]
    return [Case(site, f"{site}{i}", x, (x[:1] > 0.5).astype(np.uint8)) for i, x in enumerate(image)]


def site(train=PLAIN, n=5, seed=3, name="s", made=cases):
    net = Network(TINY_UNET.build(dims=3, modalities=2, outputs=1, seed=1), train)
    return TorchSite(name, net, {"train": list(made(n)), "validation": list(made(2, 1, "v"))}, ["L"], train, seed)
