"""Encoders against MONAI's networks, their checkpoints against files as people have them, embeddings against PCA."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.networks.nets import resnet18
from sklearn.decomposition import PCA

from polysite.errors import ConfigError, DataError, RunError
from polysite.models.encoders import SHIPPED, Bundled, Embedder, MedicalNet, principal, resize
from polysite.models.resnet3d import ResNet18


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def monai_features(net, x):
    seen = []
    net.layer4.register_forward_hook(lambda _module, _given, out: seen.append(out))
    net(x)
    return seen[0]


def dilate(net):
    """MONAI's network as MedicalNet has it: the last two stages keep the size and look further."""
    for stage, dilation in ((net.layer3, 2), (net.layer4, 4)):
        for block in stage:
            for convolution in (block.conv1, block.conv2):
                convolution.stride, convolution.dilation = (1, 1, 1), (dilation,) * 3
                convolution.padding = convolution.dilation
            if block.downsample is not None:
                block.downsample.keywords["stride"] = 1


@torch.no_grad()
def test_the_resnet_is_the_one_of_monai():
    torch.manual_seed(0)
    settings = {"conv1_t_stride": 2, "feed_forward": False, "shortcut_type": "A", "bias_downsample": False}
    net = resnet18(spatial_dims=3, n_input_channels=1, **settings).eval()
    for name, value in net.state_dict().items():
        if "running" in name:
            value.uniform_(0.5, 1.5)
    x = torch.from_numpy(noise(2, 1, 33, 40, 24))
    for dilated, sides in ((False, (2, 2, 1)), (True, (5, 5, 3))):
        if dilated:
            dilate(net)
        with torch.device("meta"):
            ours = ResNet18(dilated).eval()
        ours.load_state_dict(net.state_dict(), assign=True)
        found = ours(x)
        assert found.shape == (2, 512, *sides)
        torch.testing.assert_close(found, monai_features(net, x))


def state(**more):
    """Parameters by name as MedicalNet names them, each one number everywhere, so that a file stays small."""
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in ResNet18().state_dict().items()}
    made = {k: torch.tensor(0.1 + n).expand(shape) for n, (k, shape) in enumerate(shapes.items())}
    return {k: v for k, v in {**made, **more}.items() if v is not None}


def parallel(weights):
    return {f"module.{k}": v for k, v in weights.items()}


SEGMENTATION = {"conv_seg.0.weight": torch.ones(2, 2), "conv_seg.1.num_batches_tracked": torch.tensor(3)}


@pytest.mark.parametrize(
    ("checkpoint", "zipped"),
    [
        ({"state_dict": parallel(state())}, False),
        (state(**SEGMENTATION), True),
    ],
    ids=["published, torch 0.4", "one GPU, not wrapped"],
)
def test_checkpoints_of_medicalnet(tmp_path, checkpoint, zipped):
    file = tmp_path / "resnet_18.pth"
    torch.save(checkpoint, file, _use_new_zipfile_serialization=zipped)
    found = MedicalNet(str(file)).build().state_dict()
    wanted = {k: v for k, v in state().items() if not k.endswith("num_batches_tracked")}
    torch.testing.assert_close({k: found[k] for k in wanted}, wanted)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def truncated(file):
    torch.save(state(), file)
    file.write_bytes(file.read_bytes()[:-3000])


def tampered(**more):
    return lambda file: torch.save(state(**more), file)


REFUSED = {
    "missing": (tampered(**{"layer3.0.conv1.weight": None}), "lacks 'layer3.0.conv1.weight'"),
    "a deeper ResNet": (tampered(**{"layer1.2.conv1.weight": torch.ones(1)}), "also holds 'layer1.2.conv1.wei"),
    "shape": (tampered(**{"bn1.bias": torch.ones(3)}), r"'bn1.bias' is \(3,\), not \(64,\)"),
    "no tensor": (tampered(**{"bn1.bias": "x"}), r"'bn1.bias' is str, not \(64,\)"),
    "not finite": (tampered(**{"bn1.bias": torch.full((64,), torch.nan)}), "'bn1.bias' holds NaN"),
    "a list": (lambda f: torch.save([1, 2], f), "holds no parameters by name"),
    "truncated": (truncated, "is not a checkpoint of plain tensors"),
    "code in a checkpoint": (lambda f: torch.save({"state_dict": Trap(f.with_suffix(".ran"))}, f), "could run code"),
    "code in a pickle": (lambda f: f.write_bytes(pickle.dumps(Trap(f.with_suffix(".ran")))), "could run code"),
    "no file": (lambda f: None, "cannot be opened .No such file or directory."),
}


@pytest.mark.parametrize(("write", "says"), REFUSED.values(), ids=REFUSED)
def test_other_files_are_refused_by_name(tmp_path, write, says):
    file = tmp_path / "resnet_18.pth"
    write(file)
    with pytest.raises(ConfigError, match=says) as refused:
        MedicalNet(str(file)).build()
    assert "resnet_18.pth" in str(refused.value) and not file.with_suffix(".ran").exists()


def test_a_file_must_be_named_or_installed(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"encoder.path is missing: name MedicalNet's checkpoint"):
        MedicalNet().build()


def fixed(components):
    """Columns whose largest entry is positive."""
    largest = np.take_along_axis(components, np.abs(components).argmax(0)[None], 0)
    return components * np.sign(largest)


@pytest.mark.parametrize(("channels", "positions"), [(12, 40), (40, 12), (9, 9), (30, 3)])
def test_components_are_those_of_sklearn(channels, positions):
    features = np.stack([noise(channels, positions, seed=s) * np.arange(1, positions + 1) + s for s in range(3)])
    found = principal(torch.from_numpy(features)).numpy()
    for one, mine in zip(features.astype(float), found, strict=True):
        pca = PCA(2, svd_solver="full").fit(one.T)
        expected = fixed(pca.components_.T * pca.singular_values_ / positions**0.5)
        np.testing.assert_allclose(mine, expected, atol=1e-9)
        assert (mine.max(0) >= -mine.min(0)).all()
    order = np.random.default_rng(1).permutation(np.tile(np.arange(positions), 2))  # a larger volume, the same contents
    np.testing.assert_allclose(principal(torch.from_numpy(features[:, :, order])).numpy(), found, atol=1e-9)


def test_components_that_do_not_exist_are_zero():
    one_direction = torch.rand(2, 5, 1) * torch.rand(2, 1, 9) + 3
    constant = torch.full((2, 7, 5), 0.1)
    for features, rank in ((constant, 0), (constant.mT, 0), (torch.rand(2, 5, 1), 0), (one_direction, 1)):
        found = principal(features)
        assert found.shape == (2, features.shape[1], 2)
        assert (found.abs().amax(1) > 0).tolist() == [[rank > 0, rank > 1]] * 2


@pytest.fixture(scope="module")
def embedder():
    return Embedder(Bundled(), batch=3)


def test_an_embedding_does_not_depend_on_its_neighbours(embedder):
    shapes = [(24, 20, 28)] * 3 + [(20, 24, 28), (30, 22), (24, 20, 28)]  # batches of three of one shape
    volumes = [noise(*shape, seed=s) for s, shape in enumerate(shapes)]
    together = embedder(volumes)
    assert together.shape == (6, 128, 2) and together.dtype == np.float32
    np.testing.assert_allclose(together, np.concatenate([embedder([v]) for v in volumes]), atol=1e-5)
    assert len({e.tobytes() for e in together}) == len(volumes) and embedder([]).shape == (0, 128, 2)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 5), (0, 4, 4)], ids=str)
def test_what_is_no_volume_is_refused(embedder, shape):
    with pytest.raises(DataError, match="an encoder takes 2D and 3D images"):
        embedder([np.zeros(shape, np.float32)])


def test_shrinking_takes_means_and_stretching_is_linear():
    small = torch.from_numpy(noise(1, 1, 128, 128, 128))
    assert torch.equal(resize(small), small)
    large = small.repeat_interleave(2, 2).repeat_interleave(2, 3).repeat_interleave(2, 4)
    torch.testing.assert_close(resize(large), small)
    flat = torch.from_numpy(noise(1, 1, 30, 40))
    torch.testing.assert_close(resize(flat), flat[..., None].expand(1, 1, 30, 40, 16))
    slope = torch.arange(8.0).reshape(1, 1, 8, 1, 1).expand(1, 1, 8, 20, 20)
    np.testing.assert_allclose(resize(slope)[0, 0, 1:-1, 0, 0].diff(), 0.5, atol=1e-6)


class Crowded(torch.nn.Module):
    """A GPU with room for so many volumes."""

    def __init__(self, room):
        super().__init__()
        self.room, self.seen = room, []

    def forward(self, x):
        if len(x) > self.room:
            raise torch.OutOfMemoryError
        self.seen.append(len(x))
        return x.flatten(2)[:, :, :256].reshape(len(x), 128, 2)


def test_a_batch_that_does_not_fit_is_halved_and_a_volume_that_does_not_fit_is_named():
    embedder, volumes = Embedder(Bundled()), [noise(16, 16, 16, seed=s) for s in range(11)]
    found = []
    for room, seen in ((8, [8, 3]), (3, [2] * 5 + [1]), (1, [1] * 11)):
        embedder.network = Crowded(room)
        found.append(embedder(volumes))
        np.testing.assert_array_equal(found[0], found[-1])
        assert embedder.network.seen == seen
    embedder.network = Crowded(0)
    with pytest.raises(RunError, match=r"no room for a volume of \(16, 17, 18\)"):
        embedder([noise(16, 17, 18)])


def test_what_ships_is_small_and_complete(monkeypatch, tmp_path):
    net = Bundled().build()
    assert SHIPPED.stat().st_size < 5e6 and {p.dtype for p in net.parameters()} == {torch.float32}
    assert sum(p.numel() for p in net.parameters()) == 879_216 and len(Bundled().fingerprint) == 64
    damaged = tmp_path / "encoder.safetensors"
    damaged.write_bytes(SHIPPED.read_bytes()[:1000])
    monkeypatch.setattr("polysite.models.encoders.SHIPPED", damaged)
    with pytest.raises(ConfigError, match=r"encoder.safetensors is damaged .* install polysite again"):
        Bundled().build()
