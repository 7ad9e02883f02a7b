"""Networks with an encoder for every class: as large as the plain ones, named so that their parts can be told apart."""

import re

import pytest
import torch

from polysite.errors import ConfigError
from polysite.models import MODELS
from polysite.models.densenet import DenseNet
from polysite.models.names import canonical, deepest_of, head_of, sub_encoders_of
from polysite.models.sub_encoders import DenseNetSub, UNetSub
from polysite.models.unet import UNet

UNETS = [((16, 32, 64, 128), True), ((8, 16, 32), False), ((8, 8, 8, 8), True)]
PAIRS = {
    "unet": (UNet(), UNetSub(), [(2, 4, 3)]),
    **{f"unet {of}": (UNet(*of), UNetSub(*of), [(3, 4, 3), (2, 1, 2), (2, 4, 5), (3, 2, 1)]) for of in UNETS},
    "densenet": (DenseNet(), DenseNetSub(), [(2, 3, 3)]),
    "densenet_small": (MODELS["densenet_small"], MODELS["densenet_small_sub"], [(2, 4, 2), (3, 1, 3), (2, 1, 4)]),
    "densenet, three blocks": (DenseNet((2, 3, 2), 16, 16), DenseNetSub((2, 3, 2), 16, 16), [(3, 4, 2), (2, 1, 5)]),
}
CASES = [(*pair, *about) for *pair, settings in PAIRS.values() for about in settings]


def build(model, dims=2, modalities=1, outputs=2, seed=0):
    return model.build(dims=dims, modalities=modalities, outputs=outputs, seed=seed)


def size(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(("plain", "sub", "dims", "modalities", "outputs"), CASES)
def test_they_have_as_many_parameters_as_the_plain_network(plain, sub, dims, modalities, outputs):
    wanted, found = (size(build(m, dims, modalities, outputs)) for m in (plain, sub))
    assert found == pytest.approx(wanted, rel=0.05)
    widths = sub.widths(dims, modalities, outputs)
    whole = sub.filters if isinstance(sub, UNetSub) else (sub.features, *[sub.growth] * len(sub.blocks))
    assert all(a <= b for a, b in zip(widths, whole, strict=True))
    assert widths == whole if outputs == 1 else widths[-1] < whole[-1]


@pytest.mark.parametrize(
    ("name", "dims"), [("unet_sub", 2), ("unet_small_sub", 3), ("densenet_sub", 2), ("densenet_small_sub", 3)]
)
def test_every_parameter_belongs_to_the_encoder_of_a_class_or_to_the_decoder(name, dims):
    net = build(MODELS[name], dims, 4, 3)
    names = [canonical(n) for n, _ in net.named_parameters()]
    encoders = [n for n in names if re.match(r"(stem|encoder|bottleneck)\.class[012]\.", n)]
    rest = set(names) - set(encoders)
    assert len(set(names)) == len(names) and rest and all(n.startswith(("decoder.", "head.")) for n in rest)
    sizes = [sum(f".class{i}." in n for n in encoders) for i in range(3)]
    assert len(set(sizes)) == 1 and sum(sizes) == len(encoders)
    everything = [n for n, _ in net.named_modules()]
    assert sub_encoders_of(everything) == [f"encoders.{i}" for i in range(3)]
    assert deepest_of(everything) in ("bottleneck", "features") and head_of(everything)


def test_a_classifier_takes_the_pooled_features_of_every_class():
    net, x = build(DenseNetSub((2, 2), 8, 8), outputs=3), torch.randn(4, 1, 32, 32)
    pooled = [encoder(x)[0] for encoder in net.eval().encoders]
    assert all(f.shape == (4, net.encoders[0].channels, 1, 1) for f in pooled)
    layer = net.class_layers.out
    assert torch.allclose(net(x), torch.cat(pooled, 1).flatten(1) @ layer.weight.T + layer.bias, atol=1e-5)


def test_one_class_is_the_plain_network():
    """The same layers in the same places: given its weights, it gives its answers."""
    plain, sub = build(UNet((4, 8, 8)), 3, 2, 1), build(UNetSub((4, 8, 8)), 3, 2, 1)
    theirs = {canonical(n): p for n, p in plain.named_parameters()}
    with torch.no_grad():
        for n, p in sub.named_parameters():
            p.copy_(theirs[canonical(n).replace(".class0", "")])
    x = torch.randn(1, 2, 16, 16, 16)
    assert torch.allclose(plain(x), sub(x), atol=1e-5)


def test_what_is_no_network_is_refused():
    with pytest.raises(ConfigError, match="at least three resolutions"):
        UNetSub((4, 8))
    with pytest.raises(ConfigError, match="a DenseNet needs blocks"):
        DenseNetSub(())
    with pytest.raises(ConfigError, match=r"an encoder for every class: model\.name = 'unet_sub' or 'densenet_sub'"):
        sub_encoders_of(["", "bottleneck", "encoders"])
