"""``python -m polysite.cli``, as ``polysite``."""

from polysite.cli import main

main()
