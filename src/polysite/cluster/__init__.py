"""Clusters of sites from distances or models, and clusters of cases from features."""
