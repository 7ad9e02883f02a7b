"""From an assessment to a decision: which strategy every hospital should use, with the evidence for it."""

from polysite.advice.advise import advise
from polysite.advice.page import write as write_page
from polysite.advice.result import Advice, plain
from polysite.advice.stages import TRAININGS
from polysite.advice.tables import against_given, decision, hospitals, models, strategies, tested

__all__ = [
    "TRAININGS",
    "Advice",
    "advise",
    "against_given",
    "decision",
    "hospitals",
    "models",
    "plain",
    "strategies",
    "tested",
    "write_page",
]
