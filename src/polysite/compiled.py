"""Compilation of numerical kernels with Numba."""

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel on first use, because importing Numba is slow."""
    import numba

    try:
        return numba.njit(kernel, cache=True, nogil=True)  # type: ignore[no-any-return]
    except RuntimeError:  # no writable folder for Numba's cache
        return numba.njit(kernel, nogil=True)  # type: ignore[no-any-return]
