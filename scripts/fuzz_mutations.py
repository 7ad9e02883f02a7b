"""Damages for ``scripts/fuzz.py``: of bytes, JSON, TOML, and safetensors files with a digest that fits again."""

import hashlib
import json
import random
import struct
import tomllib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import tomli_w

AWKWARD = (
    b"", b"\0", b"\xff\xff\xff\xff", b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b"true", b'""', b"9" * 40,
    b"\n", b"\r\n", b",", b'"', b"'", b"=", b"[[[[", b"{" * 50, b"../../etc", b"\xed\xa0\x80", b"\xe2\x80\xae",
    b"9" * 5000, b"[" * 5000, b".a" * 500, b"0x" + b"f" * 300, b"\x7f\xff\xff\xff\xff\xff\xff\xff", b"'''",
    b'"""', b"\\",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**70, 10**400, 1e308, -1e308, float("nan"), float("inf"), "",
    "../..", "\0", "\ud800", [], [[]], {}, {"": None}, ["x"], {"a": {"a": {"a": []}}}, "=1+1", "train",
    "test",
    '{"case": {"tumour": 2}}', '{"case": [1]}', '{"case": {"tumour": "x"}}', "polysite.engines.rounds:Progress",
)  # fmt: skip
LARGE: tuple[Any, ...] = ("a" * 3000, [1] * 3000)  # these take longer to parse than all others together: rarely

Mutation = Callable[[bytes, random.Random], bytes]


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one to four places changed, cut, doubled or replaced by awkward bytes."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(found))
        end = min(len(found), at + rng.randint(0, 8))
        match rng.randint(0, 6):
            case 0 if at < len(found):
                found[at] = rng.randint(0, 255)
            case 1:
                del found[at:end]
            case 2:
                found[at:at] = found[at : at + rng.randint(1, 64)]
            case 3:
                del found[at:]
            case 4 if at < len(found):
                found[at] ^= 1 << rng.randint(0, 7)
            case _:
                found[at:end] = rng.choice(AWKWARD)
    return bytes(found)


def damage_value(value: Any, rng: random.Random) -> Any:
    """Return nested lists and mappings with one value, at any depth, exchanged, removed, renamed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randint(0, 7):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice([key + "x", "", "format", "kind"]): rng.choice(VALUES)}
            case _:
                return {**value, key: damage_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        k = rng.randrange(len(value))
        match rng.randint(0, 5):
            case 0:
                return [*value[:k], *value[k + 1 :]]
            case 1:
                return [*value, *value[-50:]]
            case _:
                return [*value[:k], damage_value(value[k], rng), *value[k + 1 :]]
    return rng.choice(VALUES if rng.random() < 0.99 else LARGE)


def damage_json(content: bytes, rng: random.Random) -> bytes:
    """Return JSON, or a line of JSON lines, with a value exchanged; bytes are damaged if it is none."""
    lines = content.split(b"\n") if b"}\n{" in content else [content]
    k = rng.randrange(len(lines))
    try:
        lines[k] = json.dumps(damage_value(_json(lines[k]), rng)).encode()
    except (ValueError, RecursionError):
        return damage_bytes(content, rng)
    return b"\n".join(lines)


def damage_toml(content: bytes, rng: random.Random) -> bytes:
    """Return TOML with a value exchanged; bytes are damaged if it is none, or TOML cannot say the value."""
    try:
        return tomli_w.dumps(damage_value(_toml(content), rng)).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return damage_bytes(content, rng)


@lru_cache(1000)
def _json(content: bytes) -> Any:
    """Return parsed JSON, not to be changed; the same contents are damaged again and again."""
    return json.loads(content)


@lru_cache(1000)
def _toml(content: bytes) -> Any:
    """Return parsed TOML, not to be changed."""
    return tomllib.loads(content.decode())


def damage_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with a damaged header; its length is right, and so is the digest of a checkpoint."""
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
        texts = header.get("__metadata__", {})
        name = next(iter(texts), "")
        inside = texts.get(name, "")
        digest, _, shape = inside.partition(" ") if name == "checkpoint" else ("", "", inside)
        if rng.random() < 0.7 and shape:
            shape = json.dumps(damage_value(json.loads(shape), rng))
            texts[name] = f"{_digest(shape, header, body)} {shape}" if digest else shape
        else:
            header = damage_value(header, rng)
        text = json.dumps(header).encode()
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, struct.error):
        return damage_bytes(content, rng)
    return struct.pack("<Q", len(text)) + text + body


def _digest(shape: str, header: dict[str, Any], body: bytes) -> str:
    """Return the digest of a checkpoint, as ``polysite.engines.checkpoint`` computes it."""
    kinds = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "BOOL": "|b1", "U8": "|u1", "F16": "<f2"}
    digest = hashlib.sha256(shape.encode())
    for key in sorted(k for k in header if k != "__metadata__"):
        entry = header[key]
        start, end = entry["data_offsets"]
        digest.update(f"{key} {kinds[entry['dtype']]} {tuple(entry['shape'])} ".encode())
        digest.update(body[start:end])
    return digest.hexdigest()


def mixed(structured: Mutation) -> Mutation:
    """Return a mutation that damages the structure most of the time, and the bytes otherwise."""
    return lambda content, rng: (structured if rng.random() < 0.6 else damage_bytes)(content, rng)


BYTES: Mutation = damage_bytes
JSON, TOML, TENSORS = mixed(damage_json), mixed(damage_toml), mixed(damage_safetensors)
