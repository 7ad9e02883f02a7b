"""Cache of prepared cases on disk, shared by all runs of a user.

Each case is one safetensors file, memory-mapped when opened. Its name is a digest of the content of the case's files
and of all preparation steps, so another configuration or a changed scan makes another file. Files are written
atomically, also by concurrent processes; a damaged file is made again.

The cache holds images of patients: only its owner can read it. It lies in ``$POLYSITE_CACHE``, or else in
``~/.cache/polysite``; ``polysite data cache --clear`` empties it.
"""

import json
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from polysite.buffers import Buffer
from polysite.data.case import Case, CaseRef
from polysite.data.prepare import Prepare
from polysite.errors import ConfigError, DataError, PayloadError, RunError
from polysite.foreign import parse_json
from polysite.payload import STORED, pack, unpack
from polysite.storage import map_file, write_private

VERSION = 1  # of the preparation; a new version makes every entry again, and so does another MONAI
SUFFIX = ".safetensors"
# names of entries, and of the drafts of ``write_file`` that a killed run leaves behind
OURS = re.compile(r"[0-9a-f]{40}(\.safetensors)?|\.[0-9a-f]{40}(\.safetensors)?\.[0-9a-f]{12}\.partial")
Arrays = dict[str, np.ndarray]


def place() -> Path:
    """Return the folder of the cache."""
    try:
        return Path(os.environ.get("POLYSITE_CACHE") or Path.home() / ".cache" / "polysite")
    except RuntimeError as problem:
        raise ConfigError(
            "there is no home folder here; set POLYSITE_CACHE to a folder for prepared cases"
        ) from problem


class Cache:
    """Prepared cases, and arrays computed from cases, in a folder."""

    def __init__(self, root: Path):
        self.root = root

    def get(self, ref: CaseRef, prepare: Prepare, patch: Sequence[int]) -> Case:
        """Return the prepared case, from the cache or newly made. Phantoms have no files and are not cached; nor are
        slices, which are read from their cached volume."""
        if ref.prepared or not ref.files:
            return prepare.apply(ref.open(), patch)
        file = self.root / f"{self._key(ref, prepare, patch)}{SUFFIX}"
        case = _open(file)
        if case is None:
            made = prepare.apply(ref.open(), patch)
            _write(file, _pack(made))
            case = _open(file) or made  # another process may have emptied the cache in between
        return replace(case, site=ref.site, name=ref.name, group=ref.group, patient=ref.patient)

    def recall(self, ref: CaseRef, how: Sequence[Any]) -> Arrays | None:
        """Return arrays that ``keep`` stored for a case and this recipe; None if there are none or they are damaged."""
        try:
            if not ref.files:
                return None
            stored = self._facts(ref, how).read_bytes()
            sound = zlib.crc32(stored[4:]) == int.from_bytes(stored[:4], "little")
            return unpack(stored[4:], STORED)[1] if sound else None
        except (OSError, PayloadError):
            return None

    def keep(self, ref: CaseRef, how: Sequence[Any], made: Arrays) -> None:
        """Store arrays computed from a case; ``how`` lists the settings of the computation and is part of the key."""
        if ref.files:
            content = pack(made)
            _write(self._facts(ref, how), zlib.crc32(content).to_bytes(4, "little") + content)

    def _facts(self, ref: CaseRef, how: Sequence[Any]) -> Path:
        recipe = [VERSION, [self.digest(f) for f in ref.files], ref.recipe, ref.hidden, list(how)]
        return self.root / _digest(recipe)

    def clear(self) -> int:
        """Remove all entries, and no other files; return the number of bytes freed."""
        freed = self.size
        for file in self._files():
            file.unlink(missing_ok=True)
        return freed

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return sum(f.stat().st_size for f in self._files())

    def _files(self) -> list[Path]:
        """Return all entries, including drafts of killed runs."""
        inside = [*self.root.glob("*"), *self.root.glob("stamps/*")]
        return [f for f in inside if OURS.fullmatch(f.name) and f.is_file()]

    def _key(self, ref: CaseRef, prepare: Prepare, patch: Sequence[int]) -> str:
        contents = [self.digest(f) for f in ref.files]
        recipe = [VERSION, version("monai"), contents, ref.recipe, ref.hidden, asdict(prepare), list(patch)]
        return _digest(recipe)

    def digest(self, file: Path) -> str:
        """Return the digest of a file's content, stored as long as name, size, times and inode stay the same."""
        try:
            is_now = file.stat()
            stamp = [is_now.st_size, is_now.st_mtime_ns, is_now.st_ctime_ns, is_now.st_ino]
            note = self.root / "stamps" / blake2b(os.fsencode(file.resolve()), digest_size=20).hexdigest()
            try:
                known = parse_json(note.read_bytes())
                if known["stamp"] == stamp:
                    return str(known["digest"])
            except (OSError, ValueError, TypeError, KeyError):
                pass
            content = blake2b(digest_size=20)
            with file.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    content.update(piece)
        except OSError as problem:
            raise DataError(f"{file} cannot be read: {problem.strerror}") from problem
        _write(note, json.dumps({"stamp": stamp, "digest": content.hexdigest()}).encode())
        return content.hexdigest()


def _digest(recipe: Sequence[Any]) -> str:
    return blake2b(json.dumps(recipe).encode(), digest_size=20).hexdigest()


def _pack(case: Case) -> memoryview:
    arrays = {"image": case.image, "label": case.label}
    facts = {"spacing": case.spacing, "unit": case.unit, "sum": [zlib.crc32(a.data) for a in arrays.values()]}
    return pack(arrays, {"polysite": json.dumps(facts)})


def _write(file: Path, content: Buffer) -> None:
    """Write an entry that only its owner can read."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(file, content, sync=False)
    except (OSError, RunError) as problem:
        cause = problem.__cause__ or problem
        raise DataError(
            f"the cache {file.parent} cannot be written ({getattr(cause, 'strerror', None) or cause}): make room there "
            "('polysite data cache --clear' empties it), or set POLYSITE_CACHE to another folder"
        ) from problem


def _open(file: Path) -> Case | None:
    """Return the memory-mapped case in an entry; None if it is missing or damaged."""
    try:
        texts, arrays = unpack(map_file(file), STORED)  # copy-on-write: the file must not change
        facts, image, label = parse_json(texts["polysite"]), arrays["image"], arrays["label"]
        sound = image.dtype == "<f4" and label.dtype == "u1"
        sound = sound and [zlib.crc32(a.data) for a in (image, label)] == facts["sum"]
        return Case("", "", image, label, tuple(facts["spacing"]), unit=facts["unit"]) if sound else None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, DataError, PayloadError):
        return None
