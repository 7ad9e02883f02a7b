"""A small advice for hospitals that keep their cases, and what of it is not as in the simulator."""

from dataclasses import replace

from safetensors.numpy import load_file

import consortium
import polysite as ps
from consortium import FAST, NAMES
from polysite import advice, config
from polysite.advice.connected import Connected
from polysite.data.sources import AtHospitals
from studies import SEARCHED, tiny

SITES = {"a": {"cases": 6}, "b": {"cases": 6}, "c": {"cases": 6, "scanner": 11, "contrast": 2.0}}
ASSESS = ps.Assess(permutations=99, resamples=100, projections=0)
BASE = config.vary(
    tiny({n: ps.Hospital(**h) for n, h in SITES.items()}, filters=(2, 2, 2), train=SEARCHED, run={"rounds": 2}),
    {"run": {"guard": {"use": "off"}}},
)
BASE = replace(BASE, assess=ASSESS, data=replace(BASE.data, seed=0))
ELSEWHERE = replace(BASE, data=AtHospitals(BASE.data.modality_names, BASE.data.label_names))
GIVEN = {"trainings": 16, "inner": 2, "only": ["clustered-emd"]}


def advised(folder, post, chosen=ELSEWHERE, **more):
    waiting = {"deadlines": FAST, "wait": 5, **more}
    return Connected.join(chosen, post, NAMES, folder / "advice", **waiting).advise(**GIVEN)


def differing(found, whole):
    """What is not bit for bit the same in two advices, whatever cases are called."""
    if advice.plain(found) != advice.plain(whole):
        yield "numbers"
    for name, one in whole.trained.one.items():
        if sorted(one.scores.values()) != sorted(found.trained.one[name].scores.values()):
            yield name
    for file in (whole.folder / "models" / "models").iterdir():
        one, other = (load_file(each.folder / "models" / "models" / file.name) for each in (whole, found))
        if not consortium.same(one, other):
            yield file.name
