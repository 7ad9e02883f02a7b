"""The equations of all algorithms are typeset for the documentation (``scripts/equations.py``)."""

import doctest
import importlib.util
import re
from ast import get_docstring, parse
from pathlib import Path
from xml.etree import ElementTree

import pytest

from polysite.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
MODULES = sorted({place.split(":")[0] for place in ALGORITHMS.values()})


@pytest.fixture(scope="module")
def equations():
    spec = importlib.util.spec_from_file_location("equations", ROOT / "scripts" / "equations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_hold(equations):
    assert doctest.testmod(equations).attempted >= 3 and doctest.testmod(equations).failed == 0


@pytest.mark.parametrize("module", MODULES)
def test_every_equation_is_whole(module, equations):
    """Well-formed, every bracket closed, no mark of the plain notation left; nothing but spaces is lost."""
    words = get_docstring(parse((ROOT / "src/polysite/algorithms" / f"{module}.py").read_text(encoding="utf-8")))
    plain = [line for line in words.splitlines() if line.startswith("    ")]
    made = re.findall(r"<math.*?</math>", equations.blocks(words))
    assert bool(made) == bool(plain)
    for formula in map(ElementTree.fromstring, made):
        texts = [e.text or "" for e in formula.iter() if e.tag != "mtext"]
        assert not any(mark in text for text in texts for mark in ("_", "^", "<-", "`", "{"))
        assert all(
            len(e) == {"msub": 2, "msup": 2, "munder": 2, "msubsup": 3}.get(e.tag, len(e)) for e in formula.iter()
        )
    known = {**equations.GREEK, **equations.BELOW}
    shown = "".join("".join(ElementTree.fromstring(each).itertext()) for each in made)
    for word in re.findall(r"[A-Za-z]{2,}", " ".join(plain)):
        assert word in shown or known.get(word, word[:1]) in shown or word == "sqrt"


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("sqrt((1 - a) / 2)", '<msqrt><mo stretchy="false">(</mo>'),
        ("e^(cos(z, g)/T)", "<mi>T</mi></mrow></msup></math>"),
        ("g = e^-(lam x)^gamma", "<mo>−</mo><msup>"),
        ("|v - w|^2", '<msup><mo stretchy="false" form="postfix">|</mo><mn>2</mn></msup>'),
        ("<g_k, v> < p", "<mo>⟩</mo><mo>&lt;</mo>"),
        ("c_k' = server_lr w", "<mo>′</mo></msubsup><mo>=</mo><mtext>server_lr</mtext>"),
        ("a coin for all k", "<mtext>a coin for all</mtext><mi>k</mi>"),
        ("a lam", "<mi>a</mi><mi>λ</mi>"),
    ],
)
def test_notation(text, inside, equations):
    assert inside in equations.typeset(text)
