"""Prepared cases on disk: made once, opened at once, shared by all runs of a user.

One safetensors file a case, memory-mapped when opened. Its name is a digest of the bytes of the case's files and of
everything that was done to them, so another configuration or a changed scan is another file. Files appear whole or not
at all, whoever writes at the same time; one that is damaged is made again.

The cache holds images of patients: only its owner can read it. It lies in ``$POLYSITE_CACHE``, or else in
``~/.cache/polysite``; ``polysite data cache --clear`` empties it.
"""

import json
import os
import re
import secrets
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from polysite.data.case import Case, CaseRef
from polysite.data.prepare import Prepare
from polysite.errors import ConfigError, DataError

VERSION = 1  # of what preparing does here; a change makes every entry new, and so does another MONAI
SUFFIX = ".safetensors"
OURS = re.compile(r"[0-9a-f]{40}(\.safetensors)?|\.[0-9a-f]{40}(\.safetensors)?\.[0-9a-f]{12}\.partial")
Arrays = dict[str, np.ndarray]
TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}


def place() -> Path:
    """Where the cache lies."""
    try:
        return Path(os.environ.get("POLYSITE_CACHE") or Path.home() / ".cache" / "polysite")
    except RuntimeError as problem:
        raise ConfigError(
            "there is no home folder here; set POLYSITE_CACHE to a folder for prepared cases"
        ) from problem


class Cache:
    def __init__(self, root: Path):
        self.root = root

    def get(self, patient: CaseRef, prepare: Prepare, patch: Sequence[int]) -> Case:
        """The prepared case: from the cache, or made and put there. Phantoms have no files and are only made."""
        if not patient.files:
            return prepare.apply(patient.open(), patch)
        file = self.root / f"{self._key(patient, prepare, patch)}{SUFFIX}"
        found = _open(file)
        if found is None:
            made = prepare.apply(patient.open(), patch)
            _write(file, _pack(made))
            found = _open(file) or made  # it may have been cleared in between
        return replace(found, site=patient.site, name=patient.name, group=patient.group)

    def recall(self, patient: CaseRef, how: Sequence[Any]) -> Arrays | None:
        """Arrays that were made of a case in this way; None if they were not, or are damaged."""
        try:
            if not patient.files:
                return None
            stored = self._facts(patient, how).read_bytes()
            sound = zlib.crc32(stored[4:]) == int.from_bytes(stored[:4], "little")
            return safetensors.numpy.load(stored[4:]) if sound else None
        except (OSError, safetensors.SafetensorError):
            return None

    def keep(self, patient: CaseRef, how: Sequence[Any], made: Arrays) -> None:
        """Put them there."""
        if patient.files:
            content = safetensors.numpy.save(made)
            _write(self._facts(patient, how), zlib.crc32(content).to_bytes(4, "little") + content)

    def _facts(self, patient: CaseRef, how: Sequence[Any]) -> Path:
        recipe = [VERSION, [self.digest(f) for f in patient.files], patient.recipe, patient.hidden, list(how)]
        return self.root / _digest(recipe)

    def clear(self) -> int:
        """Remove what was put here and nothing else; returns the bytes that were freed."""
        freed = self.size
        for file in self._files():
            file.unlink(missing_ok=True)
        return freed

    @property
    def size(self) -> int:
        return sum(f.stat().st_size for f in self._files())

    def _files(self) -> list[Path]:
        """All that is ours, drafts of killed runs too."""
        inside = [*self.root.glob("*"), *self.root.glob("stamps/*")]
        return [f for f in inside if OURS.fullmatch(f.name) and f.is_file()]

    def _key(self, patient: CaseRef, prepare: Prepare, patch: Sequence[int]) -> str:
        contents = [self.digest(f) for f in patient.files]
        recipe = [VERSION, version("monai"), contents, patient.recipe, patient.hidden, asdict(prepare), list(patch)]
        return _digest(recipe)

    def digest(self, file: Path) -> str:
        """Of the bytes of a file; remembered as long as the file is the same by name, size, times and inode."""
        try:
            is_now = file.stat()
            stamp = [is_now.st_size, is_now.st_mtime_ns, is_now.st_ctime_ns, is_now.st_ino]
            note = self.root / "stamps" / blake2b(os.fsencode(file.resolve()), digest_size=20).hexdigest()
            try:
                known = json.loads(note.read_bytes())
                if known["stamp"] == stamp:
                    return str(known["digest"])
            except (OSError, ValueError, TypeError, KeyError):
                pass
            found = blake2b(digest_size=20)
            with file.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    found.update(piece)
        except OSError as problem:
            raise DataError(f"{file} cannot be read: {problem.strerror}") from problem
        _write(note, json.dumps({"stamp": stamp, "digest": found.hexdigest()}).encode())
        return found.hexdigest()


def _digest(recipe: Sequence[Any]) -> str:
    return blake2b(json.dumps(recipe).encode(), digest_size=20).hexdigest()


def _pack(case: Case) -> bytes:
    arrays = {"image": case.image, "label": case.label}
    facts = {"spacing": case.spacing, "unit": case.unit, "sum": [zlib.crc32(a.data) for a in arrays.values()]}
    return safetensors.numpy.save(arrays, {"polysite": json.dumps(facts)})


def _write(file: Path, content: bytes) -> None:
    """Whole or not at all, readable by the owner alone."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(6)}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        draft.replace(file)
    except OSError as problem:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise DataError(
            f"the cache {file.parent} cannot be written ({problem.strerror}): make room there "
            "('polysite data cache --clear' empties it), or set POLYSITE_CACHE to another folder"
        ) from problem


def _open(file: Path) -> Case | None:
    """The case in an entry, memory-mapped; None if it is not there or damaged."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            head: dict[str, Any] = json.loads(stream.read(min(length, 1 << 20)))
        facts = json.loads(head["__metadata__"]["polysite"])
        arrays = []
        for name, checksum in zip(("image", "label"), facts["sum"], strict=True):
            entry = head[name]
            begin = 8 + length + entry["data_offsets"][0]
            # copy-on-write: torch wants memory that it could write to, and the file must stay as it is
            arrays.append(np.memmap(file, TYPES[entry["dtype"]], "c", begin, tuple(entry["shape"])))
            if zlib.crc32(arrays[-1].data) != checksum:
                return None
        return Case("", "", arrays[0], arrays[1], tuple(facts["spacing"]), unit=facts["unit"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, DataError):
        return None
