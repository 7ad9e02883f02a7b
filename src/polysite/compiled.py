"""Compilation of numerical kernels with Numba."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any


@cache
def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel, and the functions of its module that it calls, on first use: importing Numba is slow."""
    import numba

    near = kernel.__globals__
    for name in kernel.__code__.co_names:
        helper = near.get(name)  # once: another thread may replace it meanwhile
        if isinstance(helper, FunctionType) and helper.__module__ == kernel.__module__:
            near[name] = compiled(helper)
    try:
        return numba.njit(kernel, cache=True, nogil=True)  # type: ignore[no-any-return]
    except RuntimeError:  # no writable folder for Numba's cache
        return numba.njit(kernel, nogil=True)  # type: ignore[no-any-return]
