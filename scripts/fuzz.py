"""Feed damaged files and messages to everything in polysite that reads them; print what is not a clear refusal.

    python scripts/fuzz.py --inputs 2000 --seed 0
    python scripts/fuzz.py --inputs 1000000 --only policy --only study     # a million for some readers
    python scripts/fuzz.py --inputs 100000 --keep                          # keep what was new in the corpus
    python scripts/fuzz.py --list                                          # the readers

A reader either accepts an input or raises a `PolysiteError` of one sentence, within seconds and within 1 GiB of memory.
Anything else is a finding, printed with the input that caused it, and the script ends with exit code 1. Inputs are
sound examples and the corpus with bytes or values changed, cut, doubled or replaced by awkward ones. An input whose
outcome is new is damaged further. The corpus, `tests/corpus/READER/`, has such inputs, and all that were findings.
"""

import argparse
import hashlib
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_readers import Reader, readers

from polysite.errors import PolysiteError

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
SECONDS = 5.0  # of processor time for one input
GIBIBYTE = 1 << 30
MEMORY = Path("/dev/shm")  # files in memory, where there is such a place: twice to four times as fast
MAX_SENTENCE = 3000  # characters
MAX_KEPT, MAX_POPULATION = 4000, 300  # bytes of an input in the corpus; inputs that are damaged further


class Hang(BaseException):
    """An input took too long."""


@dataclass
class Tally:
    """What came of the inputs of one reader."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    found: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    outcomes: dict[str, bytes] = field(default_factory=dict)

    def note(self, kind: str, what: object, content: bytes) -> None:
        """Keep the first finding of a kind."""
        self.found.setdefault(kind, (f"{what!r:.300}", content))


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise ``Hang`` in this block after so many seconds of processor time."""

    def ring(_number: int, _frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attempt(reader: Reader, content: bytes, tally: Tally) -> str:
    """Read one input and return its outcome in a word or a sentence without details."""
    began = time.process_time()
    tally.inputs += 1
    try:
        with bounded(SECONDS):
            reader.read(content)
        tally.accepted += 1
        return "accepted"
    except PolysiteError as refusal:
        tally.refused += 1
        text = str(refusal)
        if "\n" in text or len(text) > MAX_SENTENCE or isinstance(refusal.__cause__, MemoryError):
            kind = "memory" if isinstance(refusal.__cause__, MemoryError) else "a refusal that is no sentence"
            tally.note(kind, text, content)
        return _gist(text)
    except Hang:
        tally.note("a hang", f"more than {SECONDS} s", content)
    except Exception as problem:
        tally.note(type(problem).__name__, problem, content)
    finally:
        tally.slowest = max(tally.slowest, time.process_time() - began)
    return "found"


def _gist(text: str) -> str:
    """Return a refusal without quoted values, paths and numbers, by which refusals of one kind are the same."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\S*[\d/\\]\S*", "_", text)[:70]


def examine(reader: Reader, inputs: int, seed: int, corpus: Path = CORPUS) -> Tally:
    """Feed a reader its examples, its corpus and damaged inputs."""
    rng, tally = random.Random(f"{seed} {reader.name}"), Tally()
    kept = sorted((corpus / place(reader)).glob("*")) if corpus.is_dir() else []
    population = [*reader.examples, *(file.read_bytes() for file in kept)]
    for k, content in enumerate(population):
        outcome = attempt(reader, content, tally)
        if k == 0 and reader.accepts and outcome != "accepted":
            tally.note("a sound example is refused", outcome, content)
        tally.outcomes.setdefault(outcome, content)
    for _ in range(inputs):
        content = reader.mutation(rng.choice(reader.examples if rng.random() < 0.4 else population), rng)
        outcome = attempt(reader, content, tally)
        if outcome not in tally.outcomes and len(content) <= MAX_KEPT:
            tally.outcomes[outcome] = content
            if len(population) < MAX_POPULATION:
                population.append(content)
    return tally


def place(reader: Reader) -> str:
    """Return the folder of a reader in the corpus."""
    return re.sub(r"[^a-z0-9]+", "-", reader.name.lower())


def keep(reader: Reader, tally: Tally, corpus: Path, most: int = 12) -> None:
    """Write findings and new outcomes to the corpus, the shortest first."""
    folder = corpus / place(reader)
    folder.mkdir(parents=True, exist_ok=True)
    new = sorted(tally.outcomes.values(), key=len)[: max(0, most - len(list(folder.iterdir())))]
    for content in (*(content for _, content in tally.found.values() if len(content) <= MAX_KEPT), *new):
        (folder / hashlib.sha256(content).hexdigest()[:12]).write_bytes(content)


def fuzz(
    inputs: int, seed: int, only: tuple[str, ...] = (), corpus: Path = CORPUS, write: bool = False
) -> Iterator[str]:
    """Yield a line for every reader: how many inputs it accepted and refused; findings begin with 'FOUND'."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        for reader in readers(Path(name)):
            if only and reader.name not in only:
                continue
            began = time.process_time()
            tally = examine(reader, inputs, seed, corpus)
            if write:
                keep(reader, tally, corpus)
            used = time.process_time() - began
            yield (
                f"{reader.name}: {tally.inputs} inputs, {tally.accepted} accepted, {tally.refused} refused, "
                f"{len(tally.outcomes)} outcomes, {used:.1f} s ({tally.inputs / max(used, 1e-9):.0f} a second), "
                f"slowest {tally.slowest:.2f} s"
            )
            for kind, (problem, content) in tally.found.items():
                yield f"FOUND {reader.name}: {kind}: {problem} for {content!r:.400}"


def limit_memory(more: int = GIBIBYTE) -> None:
    """Let every allocation fail that takes this process more than so many bytes beyond what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def main() -> int:
    """Fuzz all readers; return 1 if one of them failed otherwise than by a refusal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=2000, help="damaged inputs for every reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", action="append", default=[], metavar="READER", help="a reader by name; all by default"
    )
    parser.add_argument("--keep", action="store_true", help="add findings and new outcomes to tests/corpus")
    parser.add_argument("--list", action="store_true", help="print the names of the readers, and exit")
    asked = parser.parse_args()
    if asked.list:
        with tempfile.TemporaryDirectory() as name:
            print("\n".join(reader.name for reader in readers(Path(name))))
        return 0
    limit_memory()
    found = False
    for line in fuzz(asked.inputs, asked.seed, tuple(asked.only), write=asked.keep):
        print(line, flush=True)
        found = found or line.startswith("FOUND")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process, with torch and MONAI: {peak:.0f} MiB")
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
