"""Feed damaged files and messages to everything in polysite that reads them; print what is not a clear refusal.

    python scripts/fuzz.py --inputs 2000 --seed 0

A reader either accepts an input or raises a `PolysiteError` of one sentence. Any other exception is a finding, printed
with the input that caused it, and the script ends with exit code 1. Inputs are sound examples with bytes changed, cut,
doubled or replaced by awkward values.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np

from polysite import config, payload
from polysite.data import images, manifest
from polysite.data.split import Split
from polysite.deploy import protocol
from polysite.deploy.site import ledger
from polysite.deploy.site.policy import SitePolicy
from polysite.engines import site_memory
from polysite.engines.run_folder import RunFolder
from polysite.errors import PolysiteError
from polysite.payload import Payload

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "v0.1.0" / "deployed" / "finished"
REFUSED = ("split", "site memory")  # whose examples belong to other data than there are here
AWKWARD = (
    b"", b"\0", b"\xff\xff\xff\xff", b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b"true", b'""', b"9" * 40,
    b"\n", b"\r\n", b",", b'"', b"'", b"=", b"[[[[", b"{" * 50, b"../../etc", b"\xed\xa0\x80", b"\xe2\x80\xae",
)  # fmt: skip

VALUES = (
    None, True, -1, 0, 2**70, 1e308, float("nan"), float("inf"), "", "a" * 5000, "../..", "\0", [], [[]], {},
    {"": None}, [1] * 5000, ["x"], {"a": {"a": {"a": []}}}, '{"case": {"tumour": 2}}', '{"case": [1]}',
    '{"case": {"tumour": "x"}}',
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A reader with sound examples of what it reads."""

    name: str
    examples: tuple[bytes, ...]
    read: Callable[[bytes], object]


def damage(example: bytes, rng: np.random.Generator) -> bytes:
    """Return the example with one to four damages; half of the time, a JSON object has one value exchanged instead."""
    if example.startswith(b"{") and rng.integers(0, 2):
        values = json.loads(example.splitlines()[0] if b"}\n{" in example else example)
        values[list(values)[rng.integers(0, len(values))]] = VALUES[rng.integers(0, len(VALUES))]
        return json.dumps(values).encode()
    content = bytearray(example)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, len(content) + 1))
        end = min(len(content), at + int(rng.integers(0, 9)))
        match rng.integers(0, 6):
            case 0 if at < len(content):
                content[at] = int(rng.integers(0, 256))
            case 1:
                del content[at:end]
            case 2:
                content[at:at] = content[at : at + int(rng.integers(1, 64))]
            case 3:
                del content[at:]
            case _:
                content[at:end] = AWKWARD[rng.integers(0, len(AWKWARD))]
    return bytes(content)


def from_file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return a reader of bytes from a reader of files."""

    def call(content: bytes) -> object:
        path.write_bytes(content)
        return read(path)

    return call


def readers(folder: Path) -> Iterator[Reader]:
    """Yield every reader. Files are written to the folder."""
    model = {"conv.weight": np.ones((2, 3), np.float32), "conv.bias": np.zeros(2, np.float32)}
    yield Reader("payload", (bytes(payload.encode(Payload(model=model, cases=3.0))),), payload.decode)
    run = FIXTURES / "run"
    for name in ("config.toml", "result.json", "rounds.jsonl", "versions.json"):
        copy = folder / f"run-{name}"
        shutil.copytree(run, copy)
        yield Reader(name, ((run / name).read_bytes(),), from_file(copy / name, _run))
    memory = next((FIXTURES / "a" / "state" / "runs").glob("*/memory/round-000003.safetensors"))
    yield Reader("site memory", (memory.read_bytes(),), from_file(folder / "memory.safetensors", _memory))
    state = FIXTURES / "a" / "state"
    shutil.copy(state / "ledger.jsonl.head", folder)
    yield Reader("ledger", ((state / "ledger.jsonl").read_bytes(),), from_file(folder / "ledger.jsonl", ledger.check))
    policy = (FIXTURES / "a" / "policy.toml").read_bytes()
    yield Reader("policy", (policy,), from_file(folder / "policy.toml", SitePolicy.load))
    yield Reader("split", ((run / "split.csv").read_bytes(),), from_file(folder / "split.csv", _split))
    table = b'site,case,t1,label,labels\nnorth,a,a.nii,a_seg.nii,tumour=1\nsouth,b,b.nii,b_seg.nii,"tumour=1,4"\n'
    yield Reader("manifest", (table,), from_file(folder / "manifest.csv", manifest.read))
    nib.save(nib.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4)), folder / "whole.nii")
    yield Reader("NIfTI", ((folder / "whole.nii").read_bytes(),), from_file(folder / "x.nii", images.read))
    meta = b"ObjectType = Image\nNDims = 3\nDimSize = 2 3 4\nElementType = MET_SHORT\nElementDataFile = LOCAL\n"
    yield Reader("MetaImage", (meta + bytes(48),), from_file(folder / "x.mha", images.read))
    yield from _messages()


def _messages() -> Iterator[Reader]:
    """Yield the readers of requests and responses between coordinator and sites."""
    subject = protocol.Subject(("tumour", "oedema"))
    cases = {"train": 5, "validation": 2, "test": 2}
    ask = {
        "protocol": protocol.PROTOCOL, "study": "0123456789abcdef", "phase": 0, "round": 1, "version": 0,
        "keep": [0, 1], "split": "test", "tolerance": 1.0, "name": "best", "config": "seed = 1", "begins": 0,
        "before": 0,
    }  # fmt: skip
    score = {"case": {"tumour": 0.5, "oedema": 0.25, "loss": 0.1}}
    answer = {
        **cases, "may_score": True, "torch": "2", "seconds": 1.5, "steps": 3, "loss": 0.5, "cases": json.dumps(score),
        "models": ["0" * 64],
    }  # fmt: skip
    for kind in protocol.FIELDS:
        request = json.dumps({**ask, "kind": kind}).encode()
        yield Reader(f"request {kind}", (request,), lambda b: protocol.Request.parse(_header(b)))
        wanted = protocol.Request(kind=kind, study="0123456789abcdef", split="test")
        parse = partial(protocol.parse_response, wanted, cases=cases, subject=subject)
        yield Reader(f"response {kind}", (json.dumps(answer).encode(),), lambda b, parse=parse: parse(_header(b)))


def _header(content: bytes) -> dict[str, object]:
    """Return the header in a message; what is no JSON object never reaches the protocol."""
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _run(path: Path) -> object:
    folder = RunFolder.open(path.parent)
    return config.parse(folder.config), folder.records(), folder.result


def _memory(path: Path) -> object:
    return site_memory.load(path, "a", "scaffold", 3)


def _split(path: Path) -> object:
    return Split(file=str(path)).apply({"a": []}, 0)


def fuzz(inputs: int, seed: int) -> Iterator[str]:
    """Yield a line for every reader: how many inputs it accepted and refused; findings begin with 'FOUND'."""
    with tempfile.TemporaryDirectory() as name:
        for reader in readers(Path(name)):
            rng = np.random.default_rng([seed, len(reader.name), sum(reader.name.encode())])
            accepted, refused, found = 0, 0, {}
            if reader.name not in REFUSED:
                reader.read(reader.examples[0])  # sound, so it must be accepted
            for _ in range(inputs):
                content = damage(reader.examples[rng.integers(0, len(reader.examples))], rng)
                try:
                    reader.read(content)
                    accepted += 1
                except PolysiteError as refusal:
                    refused += 1
                    if "\n" in str(refusal):
                        found.setdefault("a refusal of several lines", (refusal, content))
                except Exception as problem:
                    found.setdefault(type(problem).__name__, (problem, content))
            yield f"{reader.name}: {inputs} inputs, {accepted} accepted, {refused} refused"
            for kind, (problem, content) in found.items():
                yield f"FOUND {reader.name}: {kind}: {problem!r:.300} for {content!r:.400}"


def main() -> int:
    """Fuzz all readers; return 1 if one of them failed otherwise than by a refusal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=2000, help="inputs for every reader")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    lines = []
    for line in fuzz(asked.inputs, asked.seed):
        print(line, flush=True)
        lines.append(line)
    return int(any(line.startswith("FOUND") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
