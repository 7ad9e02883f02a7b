"""Search for the best method and its settings within a budget, on validation cases only."""

from polysite.tuning.budgets import budget
from polysite.tuning.page import write as write_page
from polysite.tuning.search import Plan, Tuned, plan, tune
from polysite.tuning.space import Space, load
from polysite.tuning.tables import plan_table, table

__all__ = ["Plan", "Space", "Tuned", "budget", "load", "plan", "plan_table", "table", "tune", "write_page"]
