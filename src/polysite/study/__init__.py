"""From a study to a finished run: ``train`` and ``resume``; what they are made of is in the modules of this package."""

from polysite.study.cases import (
    cut,
    deal_cases,
    deal_volumes,
    load_cases,
    pinned,
    with_fixed_cases,
)
from polysite.study.engine import Engine
from polysite.study.estimate import cost, initial_params, loads
from polysite.study.finished import dealt_as_trained, models_of, open_finished, study_of
from polysite.study.sites import (
    POOLED,
    Materials,
    build_module,
    build_sites,
    check,
    refuse_ensemble,
    simulator,
)
from polysite.study.training import Run, conduct, logged, resume, title, train

__all__ = [
    "POOLED",
    "Engine",
    "Materials",
    "Run",
    "build_module",
    "build_sites",
    "check",
    "conduct",
    "cost",
    "cut",
    "deal_cases",
    "deal_volumes",
    "dealt_as_trained",
    "initial_params",
    "load_cases",
    "loads",
    "logged",
    "models_of",
    "open_finished",
    "pinned",
    "refuse_ensemble",
    "resume",
    "simulator",
    "study_of",
    "title",
    "train",
    "with_fixed_cases",
]
