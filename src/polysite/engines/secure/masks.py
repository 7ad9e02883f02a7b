"""Keys and masks of secure sums: key agreement, encryption, and masks as streams of uniform 64-bit numbers.

Two sites agree on a secret by X25519; HKDF with SHA-256 makes keys of it. Shares are encrypted by AES-256-GCM. A mask
is the key stream of AES-256 in counter mode, whose key is used for one mask alone.
"""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from polysite.errors import RunError

SEED = 32  # bytes of a seed or a private key
PIECE = 1 << 17  # numbers that are drawn at a time: they stay in the CPU's cache


def require() -> None:
    """Refuse to continue without the package that has the ciphers."""
    try:
        import cryptography  # noqa: F401
    except ImportError as problem:
        raise RunError("run.secure needs the package cryptography: pip install 'polysite[private]'") from problem


def new_seed() -> bytes:
    """Return a random seed or private key from the operating system."""
    return secrets.token_bytes(SEED)


def public_key(private: bytes) -> bytes:
    """Return the public key that belongs to a private one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed_key(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the key that two sites share, each from its own private and the other's public key, for one purpose."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), SEED, None, b"polysite secure sum " + purpose).derive(secret)


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Return the content encrypted and bound to what it is about."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(12)
    return nonce + AESGCM(key).encrypt(nonce, content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Return the content, or None if it was not encrypted by this key or is about something else."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(sealed[:12], sealed[12:], about)
    except (InvalidTag, ValueError):
        return None


def add_masks(arrays: Sequence[Any], masks: Iterable[tuple[bytes, int]]) -> None:
    """Add masks to flat arrays of uint64, in place and modulo 2^64.

    Args:
        arrays: The arrays, one after the other as far as a mask is concerned.
        masks: Seed of every mask, and whether it is added (1) or subtracted (-1).
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    zeros = bytes(8 * PIECE)
    drawn = np.empty(PIECE + 2, np.dtype("<u8"))  # the cipher wants room for one more block
    for seed, sign in masks:
        stream = Cipher(AES(seed), CTR(bytes(16))).encryptor()
        change = np.add if sign > 0 else np.subtract
        for array in arrays:
            for start in range(0, len(array), PIECE):
                piece = array[start : start + PIECE]
                stream.update_into(memoryview(zeros)[: 8 * len(piece)], drawn.view(np.uint8).data)
                change(piece, drawn[: len(piece)], out=piece)
