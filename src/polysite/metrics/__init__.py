"""Measures of overlap, surface and classification, fairness, and statistical tests."""
