"""The engine for several GPUs or machines: sites as actors of a Ray cluster. Only this folder imports ``ray``.

``placement.py`` decides where sites go, ``worker.py`` is the site's half, ``cluster.py`` starts, calls and replaces the
workers, ``transport.py`` is the server's half.
"""
