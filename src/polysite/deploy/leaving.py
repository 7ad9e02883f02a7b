"""How a hospital leaves studies, or withdraws a case, and what then remains of it.

::

    hospital                                    coordinator
    leave     deletes memories and models,  →
              writes a signed statement         leave    deletes what is kept of the hospital alone, revokes its key,
                                                         lists what remains, in RUN/left.json
                                                retrain  repeats the study without it

A model into which a hospital's replies were merged cannot be cleaned of them: the list names such models, and only a
repetition of the study makes new ones. The hospital keeps its audit log and the key of its pseudonyms, with which it
can show what left and find single cases among the coordinator's scores.
"""

import base64
import csv
import fcntl
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polysite.deploy.certificates import read_key, require
from polysite.deploy.enrolment import revoke
from polysite.deploy.project import Project, SiteConfig
from polysite.deploy.revocations import der, keys_of
from polysite.deploy.site import ledger
from polysite.deploy.site.pseudonyms import Pseudonyms
from polysite.deploy.site.withdrawn import LEFT, withdraw_case, withdrawn_cases
from polysite.engines.record import RoundRecord
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import DataError, RunError, nearest, shown
from polysite.foreign import parse_json
from polysite.storage import write_file

DEPLOYMENT = "deployment.json"
REMAINS = "left.json"  # of a run folder
FORMAT = 1  # of a statement
MAX_STATEMENT = 1 << 20  # bytes


@dataclass(frozen=True)
class Statement:
    """What a hospital tells the coordinator, signed with its key.

    Args:
        site: The hospital.
        studies: Names by which both sides know the studies.
        federation: It leaves the federation, not only these studies.
        cases: Pseudonyms of cases that were withdrawn; empty if none was.
        time: When.
    """

    site: str
    studies: tuple[str, ...]
    federation: bool
    cases: tuple[str, ...]
    time: str
    format: int = FORMAT


@dataclass(frozen=True)
class Left:
    """What a hospital did: its statement, where that lies, and what had left for each study."""

    statement: Statement
    path: Path
    sent: tuple[ledger.Total, ...]


@dataclass(frozen=True)
class Remains:
    """What a run holds of a hospital that has left.

    Args:
        run: The run folder.
        site: The hospital.
        rounds: Rounds into which a reply of it was merged, counted from 1.
        models: Files with models of which it is a part.
        checkpoints: Files with the server's state of such rounds.
        scores: Number of its cases with scores in result.json.
        evaluations: Files that hold measures of its cases.
        assessment: Whether an assessment describes it.
        deleted: Files that were of this hospital alone.
        time: When this was listed.
    """

    run: str
    site: str
    rounds: tuple[int, ...]
    models: tuple[str, ...]
    checkpoints: tuple[str, ...]
    scores: int
    evaluations: tuple[str, ...]
    assessment: bool
    deleted: tuple[str, ...]
    time: str


# at the hospital


def leave(folder: Path, study: str = "") -> Left:
    """Leave one study, or the federation: delete all memories and models, note it in the audit log, and write a signed
    statement for the coordinator. The site must not be running."""
    require()
    site = SiteConfig.load(folder, check=False)
    with _idle(site):
        known = _studies(site)
        if study and study not in known:
            raise RunError(f"{study!r} is not a study of this site; its studies are {', '.join(known) or 'none'}")
        return _leave(site, [study] if study else known, federation=not study)


def withdraw(folder: Path, case: str) -> Left:
    """Withdraw a case: no later study sees it, and the site leaves all studies that it took part in so far."""
    require()
    site = SiteConfig.load(folder, check=False)
    with _idle(site):
        if case in withdrawn_cases(site.state):
            raise RunError(f"the case {case!r} was withdrawn before")
        _check_case(site, case)
        known = _studies(site)
        pseudonym = Pseudonyms(site.state / "secret").of(case)
        withdraw_case(site.state, case)  # first: whatever happens now, no study sees it
        return _leave(site, known, federation=False, cases=(pseudonym,))


def _leave(site: SiteConfig, studies: Sequence[str], federation: bool, cases: tuple[str, ...] = ()) -> Left:
    key, log = read_key(site.key), site.state / "ledger.jsonl"
    entries = ledger.check(log) if log.exists() else []
    sent = tuple(t for t in ledger.summary(entries) if t.study in studies and t.bytes)
    statement = Statement(site.name, tuple(studies), federation, cases, _now())
    writer = ledger.Ledger(log)
    for each in studies:
        writer.write({"kind": "leave", "study": each, "bytes": 0, "left": {}})
        place = site.state / "runs" / file_name(each)
        write_file(place / LEFT, lambda p: p.write_text(f"{statement.time}\n"))  # from now on it refuses the study
        for inside in list(place.iterdir()):
            if inside.is_dir():
                shutil.rmtree(inside)
            elif inside.name not in (LEFT, "study.toml"):
                inside.unlink()
    if federation:
        writer.write({"kind": "leave", "study": "", "bytes": 0, "left": {}})
        write_file(site.state / LEFT, lambda p: p.write_text(f"{statement.time}\n"))
    path = site.path.parent / f"{file_name(site.name)}.leave"
    write_file(path, lambda p: p.write_text(_signed(statement, key)))
    return Left(statement, path, sent)


def _check_case(site: SiteConfig, case: str) -> None:
    """Refuse a case that is not among the hospital's own."""
    if site.data:
        from polysite import config

        names = {
            ref.name for refs in config.build({"data": dict(site.data)}).data.case_refs(0).values() for ref in refs
        }
        if case not in names:
            raise DataError(f"there is no case {case!r} in the data of this site; {nearest(case, names)}")


def _studies(site: SiteConfig) -> list[str]:
    """Return the studies that a site takes part in."""
    folders = sorted((site.state / "runs").glob("*/study.toml"))
    return [f.parent.name for f in folders if not (f.parent / LEFT).exists()]


@contextmanager
def _idle(site: SiteConfig) -> Iterator[None]:
    """Refuse to continue while the courier or the worker of a site runs."""
    site.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as stack:
        for name in (".lock", "worker.lock"):
            file = stack.enter_context((site.state / name).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as problem:
                raise RunError(f"'polysite site run' is running for {site.state}; stop it first") from problem
        yield


def _signed(statement: Statement, key: Any) -> str:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    text = json.dumps(asdict(statement), sort_keys=True)
    signature = key.sign(text.encode(), ec.ECDSA(hashes.SHA384()))
    return json.dumps({"statement": text, "signature": base64.b64encode(signature).decode()}, indent=1) + "\n"


# at the coordinator


def accept(folder: Path, path: Path, runs: Path) -> tuple[Statement, list[Remains]]:
    """Carry out the statement of a hospital that leaves: revoke its key if it leaves the federation; in all runs below
    ``runs`` that it concerns, delete what is of this hospital alone, and list what remains. It can be repeated."""
    require()
    project = Project.load(folder, check=False)
    statement = read_statement(path, project)
    if statement.federation and statement.site in project.sites:
        revoke(folder, statement.site)
    found = []
    for run in concerned(runs, statement):
        with run.alone():
            found.append(clear(run, statement.site, statement.time))
    return statement, found


def read_statement(path: Path, project: Project) -> Statement:
    """Read a statement, and verify that the hospital signed it: with its key, or with one that was revoked if it has no
    other."""
    try:
        if path.stat().st_size > MAX_STATEMENT:
            raise ValueError("it is too long")
        outer = parse_json(path.read_text(encoding="utf-8"))
        text, signature = str(outer["statement"]), base64.b64decode(outer["signature"], validate=True)
        given = parse_json(text)
        if given.pop("format") != FORMAT:
            raise ValueError("its format is that of another version")
        studies, cases = (tuple(map(str, given[k])) for k in ("studies", "cases"))
        statement = Statement(str(given["site"]), studies, given["federation"] is True, cases, str(given["time"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise DataError(f"{path} is not a statement of 'polysite site leave': {shown(problem, 100)}") from problem
    site = statement.site
    keys = [der(project.sites[site])] if site in project.sites else keys_of(project.revoked, site)
    if not keys:
        raise DataError(f"{path} is of {shown(site, 64)!r}, which has no key in this project")
    if not any(_is_signed(key, text, signature) for key in keys):
        raise DataError(f"{path} was not signed with the key of {site}, or was changed since")
    return statement


def _is_signed(key: bytes, text: str, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    try:
        load_der_public_key(key).verify(signature, text.encode(), ec.ECDSA(hashes.SHA384()))  # type: ignore[union-attr,call-arg,arg-type]
    except (InvalidSignature, ValueError):
        return False
    return True


def concerned(runs: Path, statement: Statement) -> Iterator[RunFolder]:
    """Yield the deployed runs below a folder that a statement is about."""
    for file in sorted(runs.rglob(DEPLOYMENT)):
        try:
            known = parse_json(file.read_text(encoding="utf-8"))
            study, sites = str(known["study"]), set(known["sites"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if statement.site in sites and (study in statement.studies or statement.federation):
            yield RunFolder.open(file.parent)


def clear(run: RunFolder, site: str, time: str = "") -> Remains:
    """Delete what a run holds of one hospital alone; list what remains, and write that list to the run folder."""
    alone = [*_models_of(run, site), *sorted((run.path / "sites" / file_name(site)).glob("*"))]
    deleted = tuple(str(p.relative_to(run.path)) for p in alone)
    for path in alone:
        path.unlink()
    before = _noted(run, site)
    found = remains(run, site, tuple(dict.fromkeys([*before, *deleted])), time or _now())
    others = [each for each in _all_noted(run) if each.get("site") != site]
    write_file(run.path / REMAINS, lambda p: p.write_text(json.dumps([*others, asdict(found)], indent=1) + "\n"))
    return found


def remains(run: RunFolder, site: str, deleted: tuple[str, ...] = (), time: str = "") -> Remains:
    """Return what a run holds of a hospital."""
    rounds = [record.round for record in run.records() if _merged(record, site)]
    first = min(rounds, default=None)
    result = run.result if run.finished else None
    last = result.rounds - 1 if result else max((r.round for r in run.records()), default=-1)
    best = result.best_round if result else last
    ends = {"best": best, "common-best": best, "last": last}
    models, checkpoints = [], []
    if first is not None:
        models = [p.name for p in _files(run, "models") if ends.get(p.name.partition(".")[0], last) >= first]
        checkpoints = [p.name for p in _files(run, "checkpoints") if _round_of(p) >= first]
    scores = {case for split in (result.validation, result.test) for case in split.get(site, {})} if result else set()
    tables = [p for p in sorted((run.path / "evaluation").rglob("*.csv")) if _names(p, site)]
    return Remains(
        str(run.path), site, tuple(r + 1 for r in rounds), tuple(models), tuple(checkpoints), len(scores),
        tuple(str(p.relative_to(run.path)) for p in tables), (run.path / "assessment").is_dir(), deleted, time,
    )  # fmt: skip


def sentences(found: Remains) -> Iterator[str]:
    """Yield what a person should read about a run."""
    yield f"{found.run}: {found.site} was merged into {_spans(found.rounds) or 'no round'}"
    if found.models:
        yield f"  models of which it is a part: {', '.join(found.models)}"
    if found.checkpoints:
        yield f"  checkpoints of such rounds: {len(found.checkpoints)}"
    if found.scores or found.evaluations:
        tables = f", and {', '.join(found.evaluations)}" if found.evaluations else ""
        yield f"  scores of {found.scores} of its cases, under pseudonyms, in result.json{tables}"
    if found.assessment:
        yield "  an assessment that describes its cases together: assessment/"
    if found.deleted:
        yield f"  deleted: {', '.join(found.deleted)}"


def _merged(record: RoundRecord, site: str) -> bool:
    return site in record.sites and site not in record.refused


def _files(run: RunFolder, inside: str) -> list[Path]:
    return sorted((run.path / inside).glob("*.safetensors"))


def _models_of(run: RunFolder, site: str) -> list[Path]:
    """Return the models that only one hospital is served: KIND.SITE or KIND.SITE.group-K."""
    name = file_name(site)
    return [p for p in _files(run, "models") if p.stem.partition(".")[2].split(".group-")[0] == name]


def _round_of(path: Path) -> int:
    """Return the round of a checkpoint; one that a later phase began from counts as late."""
    if path.name.startswith("phase-"):
        return -1 if path.stem == "phase-0" else 1 << 30
    return int(path.stem.rpartition("-")[2])


def _names(path: Path, site: str) -> bool:
    """Whether a table has a row of a hospital."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        return any(site in row for row in csv.reader(file))


def _all_noted(run: RunFolder) -> list[Mapping[str, Any]]:
    path = run.path / REMAINS
    try:
        noted = parse_json(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError:
        noted = []
    return [each for each in noted if isinstance(each, dict)] if isinstance(noted, list) else []


def _noted(run: RunFolder, site: str) -> Collection[str]:
    return [str(f) for each in _all_noted(run) if each.get("site") == site for f in each.get("deleted", ())]


def _spans(rounds: Sequence[int]) -> str:
    """Return rounds in words.

    >>> _spans([1, 2, 3, 7]), _spans([4]), _spans([])
    ('rounds 1-3, 7', 'round 4', '')
    """
    spans: list[list[int]] = []
    for each in rounds:
        if spans and spans[-1][1] == each - 1:
            spans[-1][1] = each
        else:
            spans.append([each, each])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return words and f"round{'s' if len(rounds) > 1 else ''} {words}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
