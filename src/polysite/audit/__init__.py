"""Attacks on what leaves hospitals: ``numbers.py`` on the numbers that describe cases, ``models.py`` on the models of a
finished run. ``findings.py`` has the shape and the page of what either finds."""
