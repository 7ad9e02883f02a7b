"""Defaults from the data: settings that a study leaves open, from the shapes, spacings and numbers of its cases.

``statistics.py`` measures the cases of every site, ``rules.py`` turns the numbers into settings with a reason each, and
``studies.py`` puts them where a study leaves a choice. The idea, and several rules, are those of nnU-Net's fingerprint
and plan (Isensee et al., Nature Methods 2021).
"""

from polysite.planning.rules import DataPlan, make_plan
from polysite.planning.statistics import SiteStatistics, measure
from polysite.planning.studies import plan, planned

__all__ = ["DataPlan", "SiteStatistics", "make_plan", "measure", "plan", "planned"]
