"""Two sides work together where the code that decides results is the same, whatever its prose is."""

import inspect
import json

import numpy as np
import pytest

from polysite.deploy import identity, protocol
from polysite.metrics.measures import MEASURES, measure
from polysite.training import torch_site

SOURCE = '''
"""A module."""
LIMIT = 3  # of something


class Step:
    """A class."""

    size: int = 1
    """An attribute."""

    def take(self, x):
        """A method."""
        return x + self.size
'''
PROSE = {"A module.": "Another.", "# of something": "", "A method.": "Else.", "An attribute.": "Else."}
CODE = {"LIMIT = 3": "LIMIT = 4", "x + self": "x - self", "take": "do", "= 1": "= 1.0"}


@pytest.mark.parametrize("old, new", [*PROSE.items(), ("return x + self.size", "return (\n x + self.size)")])
def test_prose_does_not_change_the_digest(old, new):
    assert identity.code_of(SOURCE) == identity.code_of(SOURCE.replace(old, new))


@pytest.mark.parametrize("old", CODE)
def test_code_changes_the_digest(old):
    assert identity.code_of(SOURCE) != identity.code_of(SOURCE.replace(old, CODE[old]))


def test_what_decides_results_is_covered_and_what_does_not_is_not():
    modules = identity.deciding_modules()
    wanted = ("algorithms.scaffold", "training.losses", "models.unet", "data.prepare", "deploy.protocol")
    assert {f"polysite.{name}" for name in wanted} <= modules.keys()
    assert not any(name.startswith(("polysite.report", "polysite.cli", "polysite.deploy.site")) for name in modules)
    assert modules["polysite.training.torch_site"] == inspect.getsource(torch_site)


def test_another_version_with_the_same_code_is_accepted():
    own = identity.identity()
    assert identity.difference({**own, "polysite": "9.9"}) is None
    assert "install the same" in str(identity.difference({**own, "code": "other"}))
    assert "unknown" in str(identity.difference({}))


def test_every_measure_of_a_case_has_a_name_in_the_protocol():
    mask, empty = np.eye(4, dtype=bool), np.zeros((4, 4), bool)
    for predicted, truth in ((mask, mask), (mask, empty), (empty, mask), (empty, empty)):  # NaN and infinity, too
        row = measure(predicted, truth, (1.0, 1.0))
        sent = json.loads(json.dumps({k: protocol._packed(v) for k, v in row.items()}))
        received = protocol._measures("case", sent, MEASURES, protocol.Subject(("WT",), False))
        assert received == pytest.approx(row, nan_ok=True) and tuple(row) == tuple(MEASURES)
