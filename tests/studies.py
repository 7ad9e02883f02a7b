"""Small studies for tests: phantoms of 24 voxels a side, a network of few filters, on the CPU."""

import polysite as ps

SHAPE = (24, 24, 24)


def clinics(*names, cases=5):
    """Hospitals with scanners of their own."""
    return {name: ps.Hospital(cases=cases, scanner=scanner) for scanner, name in enumerate(names)}


def tiny(sites, *, filters=(2, 4, 4), train=None, run=None, **sections):
    """A study of hospitals, or of numbers of cases by hospital, with the settings that differ from the usual ones."""
    found = {name: ps.Hospital(cases=each) if isinstance(each, int) else each for name, each in sites.items()}
    return ps.Study(
        model=ps.UNet(filters=filters),
        data=ps.Phantom(shape=SHAPE, sites=found),
        train=ps.Train(**{"patch": (16, 16, 16), "device": "cpu", **(train or {})}),
        run=ps.Plan(**(run or {})),
        **sections,
    )


def text(sites, train="", run="", *, filters=(2, 4, 4), patch=16, model="unet"):
    """The same as TOML, to which sections can be added; hospitals are numbers of cases or TOML."""
    given = {name: f"cases = {each}" if isinstance(each, int) else each for name, each in sites.items()}
    hospitals = "\n".join(f"{name} = {{ {each} }}" for name, each in given.items())
    return f"""
[model]
name = "{model}"
filters = {list(filters)}
[data]
name = "phantom"
shape = {list(SHAPE)}
[data.sites]
{hospitals}
[train]
patch = {[patch] * 3}
device = "cpu"
{train}
[run]
{run}
"""


SMALL = tiny(clinics("east", "north", "west"), train={"batch": 4, "augment": "light"}, run={"rounds": 2})
SEARCHED = {"patch": (8, 8, 8), "window": SHAPE, "lr": 0.5, "batch": 2, "augment": "none"}  # for ``train`` of a search
