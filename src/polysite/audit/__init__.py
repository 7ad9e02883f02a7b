"""Attacks on what leaves hospitals: ``numbers.py`` on the numbers that describe cases, ``training.py`` on the models of
a finished run."""
