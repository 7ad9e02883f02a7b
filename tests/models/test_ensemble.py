"""The network of an ensemble: means of known logits, names of parameters, refusals."""

import pytest
import torch

import polysite as ps
from polysite.config import dump, parse
from polysite.errors import ConfigError
from polysite.models.ensemble import Ensemble, joined
from polysite.training.network import Network

TINY, WIDER = ps.UNet(filters=(2, 4, 4)), ps.UNet(filters=(4, 4, 4))


def test_members_keep_their_parameters_under_names_of_their_own_and_their_logits_are_averaged():
    model, shape = Ensemble((TINY, WIDER)), {"dims": 3, "modalities": 2, "outputs": 1}
    train = ps.Train(device="cpu")
    nets = [Network(m.build(**shape, seed=k), train) for k, m in enumerate(model.members)]
    whole = Network(model.build(**shape, seed=7), train)
    tree = joined([net.start for net in nets])
    assert tree.keys() == whole.leaves.keys() and "members.1.head.conv.conv.bias" in tree
    x = torch.randn(2, 2, 8, 8, 8)
    first, second = (net(x) for net in nets)
    whole.write(tree)
    torch.testing.assert_close(whole(x), (first + second) / 2)
    whole.write({**tree, "weights": torch.tensor([0.25, 0.75])})  # as polysite 0.1.0 chose them
    torch.testing.assert_close(whole(x), 0.25 * first + 0.75 * second)


def test_an_ensemble_survives_its_file_and_refuses_nonsense():
    members = '[{ name = "unet_small" }, { name = "unet", filters = [2, 4, 4] }]'
    study = parse("", {"model.name": "ensemble", "model.members": members})
    assert study.model == Ensemble((ps.UNet(filters=(16, 32, 64, 128)), TINY)) and study.model.divisor == 8
    assert parse(dump(study, notes=True)) == study
    for members, words in (
        ((TINY,), "at least two networks, model.members has 1"),
        ((TINY, ps.DenseNet()), "classification and for segmentation; an ensemble has one task"),
        ((TINY, Ensemble((TINY, TINY))), "no member of an ensemble"),
    ):
        with pytest.raises(ConfigError, match=words):
            Ensemble(members)
