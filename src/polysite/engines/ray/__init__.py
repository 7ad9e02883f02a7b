"""The engine for several GPUs or machines: sites as actors of a Ray cluster. Only this folder imports ``ray``.

``placement.py`` decides where sites go, ``worker.py`` has the hosts of sites, ``cluster.py`` starts, calls and replaces
the workers, ``wire.py`` asks them.
"""
