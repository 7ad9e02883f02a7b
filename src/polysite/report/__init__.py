"""Figures, tables and pages of runs, assessments and audits."""
