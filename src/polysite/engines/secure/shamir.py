"""Shamir's secret sharing: any ``threshold`` shares give the secret, fewer say nothing about it.

Paper: Shamir, How to Share a Secret, Communications of the ACM 1979

    f(x) = secret + a_1 x + ... + a_{t-1} x^{t-1}  modulo P,    share of place x: f(x),    secret = f(0)

The coefficients are uniform. P is the smallest prime above 2^256, so a secret has 32 bytes and a share 33.
"""

import secrets
from collections.abc import Iterable, Mapping

PRIME = 2**256 + 297
SECRET, SHARE = 32, 33  # bytes


def split(secret: bytes, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """Return a share of the secret for every place; places are whole numbers from 1.

    >>> shares = split(bytes(range(32)), 2, [1, 2, 3])
    >>> combine({k: shares[k] for k in (1, 3)}) == bytes(range(32))
    True
    """
    if len(secret) != SECRET or threshold < 1:
        raise ValueError(f"a secret of {len(secret)} bytes cannot be shared among {threshold}")
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: _value(polynomial, x).to_bytes(SHARE) for x in places}


def _value(polynomial: list[int], x: int) -> int:
    total = 0
    for coefficient in reversed(polynomial):
        total = (total * x + coefficient) % PRIME
    return total


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret behind shares, by their places; None if they are shares of nothing that has 32 bytes."""
    total = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total += int.from_bytes(share) * above * pow(below, -1, PRIME)
    secret = total % PRIME
    return secret.to_bytes(SECRET) if secret < 2 ** (8 * SECRET) else None
