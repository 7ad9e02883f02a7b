"""The network of an ensemble: means of known logits, names of parameters, refusals."""

import pytest
import torch

import polysite as ps
from polysite.config import dump, parse
from polysite.errors import ConfigError
from polysite.models.ensemble import Ensemble, joined
from polysite.models.ensemble_network import EnsembleNetwork
from polysite.training.network import Network

TINY, WIDER = ps.UNet(filters=(2, 4, 4)), ps.UNet(filters=(4, 4, 4))


class Constant(torch.nn.Module):
    """A network with one logit for all voxels."""

    def __init__(self, logit):
        super().__init__()
        self.logit = logit

    def forward(self, x):
        return torch.full_like(x, self.logit)


def test_the_mean_of_known_logits():
    net, x = EnsembleNetwork([Constant(2.0), Constant(-1.0), Constant(5.0)]), torch.zeros(1, 1, 4, 4)
    assert torch.equal(net(x), torch.full_like(x, 2.0))
    net.weights.copy_(torch.tensor([0.5, 0.5, 0.0]))
    assert torch.equal(net(x), torch.full_like(x, 0.5))


def test_members_keep_their_parameters_under_names_of_their_own():
    model, shape = Ensemble((TINY, WIDER)), {"dims": 3, "modalities": 2, "outputs": 1}
    train = ps.Train(device="cpu")
    nets = [Network(m.build(**shape, seed=k), train) for k, m in enumerate(model.members)]
    whole = Network(model.build(**shape, seed=7), train)
    tree = joined([net.start for net in nets])
    assert torch.equal(tree["weights"], torch.tensor([0.5, 0.5]))
    tree["weights"] = torch.tensor([0.25, 0.75])  # as polysite 0.1.0 chose them
    assert tree.keys() == whole.leaves.keys() and "members.1.head.conv.conv.bias" in tree
    whole.write(tree)
    x = torch.randn(2, 2, 8, 8, 8)
    first, second = (net(x) for net in nets)
    torch.testing.assert_close(whole(x), 0.25 * first + 0.75 * second)
    start = whole.module.members[0].state_dict(), whole.module.members[1].state_dict()
    assert len(start[0]) == len(start[1])


def test_an_ensemble_survives_its_file_and_refuses_nonsense():
    study = parse(
        "",
        {
            "model.name": "ensemble",
            "model.members": '[{ name = "unet_small" }, { name = "unet", filters = [2, 4, 4] }]',
        },
    )
    assert study.model == Ensemble((ps.UNet(filters=(16, 32, 64, 128)), TINY)) and study.model.divisor == 8
    assert parse(dump(study, notes=True)) == study
    for members, words in (
        ((TINY,), "at least two networks, model.members has 1"),
        ((TINY, ps.DenseNet()), "classification and for segmentation; an ensemble has one task"),
        ((TINY, Ensemble((TINY, TINY))), "no member of an ensemble"),
    ):
        with pytest.raises(ConfigError, match=words):
            Ensemble(members)
