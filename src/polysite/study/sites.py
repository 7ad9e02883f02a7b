"""The sites of a study: built with their cases around one network, in the phases of a simulated federation."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

from polysite import config, plugins
from polysite.algorithms import name_of
from polysite.algorithms.base import check_sites, facts
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.split import SiteSplit
from polysite.engines.phases import Phase
from polysite.engines.simulator import Simulator
from polysite.engines.watch import Watch
from polysite.errors import ConfigError
from polysite.models.ensemble import Ensemble
from polysite.models.monai import Monai
from polysite.study.cases import PreparedCases, deal_cases, load_cases
from polysite.training import tasks
from polysite.training.network import Network
from polysite.training.torch_site import TorchSite

POOLED = "pooled"  # the site of centralised training


def check(study: Study, watch: Watch = Watch()) -> Mapping[str, SiteSplit]:
    """Return the cases of every site; refuse what the algorithms of the study cannot do with these sites.

    Nothing is prepared (except volumes that are cut) or trained: this finds unknown names of sites and too few cases
    before a long computation.
    """
    refuse_bare(study)
    refuse_ensemble(study)
    refuse_lost(study)
    dealt = deal_cases(study, watch)
    try_network(study)
    for phase in config.phases(study):
        phase.algorithm.init({}, [site for site, splits in dealt.items() if splits["train"]])  # may refuse these sites
        check_sites(phase.algorithm, *({i: len(s[k]) for i, s in dealt.items()} for k in ("train", "validation")))
    return dealt


def refuse_bare(study: Study) -> None:
    """Refuse a first phase whose algorithm continues from a trained model."""
    first = study.algorithm
    while hasattr(first, "inner"):
        first = first.inner
    if facts(first).needs_model:
        name = name_of(first)
        raise ConfigError(f"{name} goes on from a model: let it come after another algorithm, under [[then]]")


def refuse_lost(study: Study) -> None:
    """Refuse a study whose own classes config.toml cannot name, so that it could not be resumed or evaluated."""
    config.parse(config.dump(study), where="config.toml of this study")


def try_network(study: Study) -> None:
    """Refuse a network from outside of polysite that cannot predict a patch of zeros."""
    if not (isinstance(study.model, Monai) or plugins.is_foreign(study.model)):
        return
    import torch

    task = tasks.find(study.data.task, study.train.exclusive)
    given = torch.zeros((1, len(study.data.modality_names), *study.train.patch))
    outputs = task.outputs(study.data.label_names)
    wanted = (1, outputs) if isinstance(task, tasks.Classify) else (1, outputs, *study.train.patch)
    try:
        with torch.no_grad():
            made = build_module(study).eval()(given)
    except ConfigError:
        raise
    except Exception as problem:
        raise ConfigError(
            f"the network cannot predict a patch of {list(study.train.patch)} voxels: {problem}; change train.patch, "
            "or the network"
        ) from problem
    logits = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != wanted:
        got = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ConfigError(
            f"the network answers a patch of {list(given.shape)} with {got} instead of logits of {list(wanted)}: "
            "change its arguments, or return such logits (further heads after them, in a tuple)"
        )


def refuse_ensemble(study: Study) -> None:
    """Refuse to train an ensemble."""
    if isinstance(study.model, Ensemble):
        raise ConfigError(
            "an ensemble is not trained: train its members with 'polysite train STUDY --trainings 3 --out FOLDER'"
        )


class Materials:
    """Loads the prepared cases of a run and builds its network."""

    def cases(self, study: Study, dealt: Mapping[str, SiteSplit], watch: Watch = Watch()) -> PreparedCases:
        """Return the prepared cases of every site and split."""
        return load_cases(study, dealt, watch)

    def network(self, study: Study, sizes: Mapping[str, int]) -> Network:
        """Return the network that all sites share; ``sizes`` are their numbers of training cases."""
        return Network(build_module(study), study.train, expected_steps(study, sizes))


def train_sizes(ready: PreparedCases) -> dict[str, int]:
    """Return the number of training cases of every site."""
    return {site: len(splits["train"]) for site, splits in ready.items()}


def expected_steps(study: Study, sizes: Mapping[str, int]) -> int:
    """Return about how many training steps sites of these numbers of cases take in all rounds of a study."""
    total = 0
    for phase in config.phases(study):
        train, epochs = phase.train, getattr(phase.algorithm, "epochs", None) or phase.train.epochs
        for size in sizes.values():
            epoch = ceil(size * train.patches / train.batch)
            total += phase.run.rounds * (train.steps or epochs * epoch)
    return total


def build_module(study: Study) -> Any:
    """Return the untrained network of a study."""
    source, task = study.data, tasks.find(study.data.task, study.train.exclusive)
    return study.model.build(
        dims=study.dims,
        modalities=len(source.modality_names),
        outputs=task.outputs(source.label_names),
        seed=study.seed,
    )


def build_sites(
    study: Study, dealt: Mapping[str, SiteSplit] | None = None, watch: Watch = Watch(), network: Network | None = None
) -> dict[str, TorchSite]:
    """Return the sites of a study, which share one network; cases are prepared, or read from the cache."""
    ready = load_cases(study, dealt or deal_cases(study), watch)
    return with_cases(study, ready, network or Materials().network(study, train_sizes(ready)))


def with_cases(study: Study, ready: PreparedCases, network: Network) -> dict[str, TorchSite]:
    """Return the sites with these cases."""
    source = study.data
    task = tasks.find(source.task, study.train.exclusive)
    brain = partial(study.prepare.brain, modalities=source.modality_names)
    return {
        site: TorchSite(site, network, cases, source.label_names, study.train, study.seed, task, brain)
        for site, cases in ready.items()
    }


def simulator(study: Study, dealt: Mapping[str, SiteSplit] | None = None, watch: Watch = Watch()) -> Simulator:
    """Return the simulated federation, in its first phase."""
    return _simulator(config.phases(study)[0], build_sites(study, dealt, watch))


def _simulator(study: Study, sites: Mapping[str, TorchSite], after: Simulator | None = None) -> Simulator:
    """Return one phase of the simulation. With ``run.pooled`` one site has all training cases; the hospitals score."""
    names, audience = roles(study, {s: {k: site.cases(k) for k in SPLITS} for s, site in sites.items()})
    train = {POOLED: TorchSite.pool(POOLED, sites)} if study.run.pooled else {s: sites[s] for s in names}
    guests = {s: sites[s] for s in audience}
    run = study.run
    return Simulator(
        study.algorithm,
        train,
        guests=guests,
        wire=run.wire,
        outgoing=run.outgoing,
        secure=run.secure,
        private=study.train.private,
        after=after,
    )


def roles(study: Study, cases: Mapping[str, Mapping[str, Sequence[Any]]]) -> tuple[list[str], list[str]]:
    """Return the sites that train in a phase and the sites that score its models, given the cases of every site."""
    train = [s for s, splits in cases.items() if splits["train"]]
    audience = [s for s, splits in cases.items() if splits["validation"] or splits["test"]]
    strangers = sorted({*audience} - {*train})
    if strangers and not facts(study.algorithm).strangers:
        raise ConfigError(
            f"{name_of(study.algorithm)} has no model for {strangers[0]!r}, which does not train: choose another "
            "algorithm, or a federation in which every site trains"
        )
    return ([POOLED] if study.run.pooled else train), audience


def build_phases(study: Study, sites: Mapping[str, TorchSite]) -> list[Phase]:
    """Return the phases of the simulated federation; all use the same cases and take turns in the same network."""
    refuse_bare(study)
    phases: list[Phase] = []
    engine: Simulator | None = None
    for phase in config.phases(study):
        engine = _simulator(phase, {i: site.under(phase.train) for i, site in sites.items()}, engine)
        phases.append(Phase(phase.algorithm, engine, phase.run))
    return phases
