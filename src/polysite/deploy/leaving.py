"""How a hospital leaves studies or withdraws a case, and what is then deleted of it.

The hospital deletes its memories and models, and refuses these studies from then on. The coordinator revokes its key,
and deletes what the runs hold of this hospital alone. A model into which its replies were merged cannot be cleaned of
them; only a repetition of the study without it makes new ones. The hospital keeps its audit log and the key of its
pseudonyms, with which it can show what left and find single cases among the coordinator's scores.
"""

import fcntl
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from polysite.deploy.enrolment import revoke
from polysite.deploy.project import Project, SiteConfig
from polysite.deploy.site.ledger import Ledger
from polysite.deploy.site.withdrawn import LEFT, withdraw_case, withdrawn_cases
from polysite.engines.run_folder import RunFolder, file_name
from polysite.errors import DataError, RunError, nearest
from polysite.foreign import parse_json
from polysite.storage import write_file

DEPLOYMENT = "deployment.json"  # file of a deployed run

# at the hospital


def leave(folder: Path, study: str = "") -> list[str]:
    """Leave one study, or the federation: delete all memories and models, and note it in the audit log. Return the
    studies that were left. The site must not be running."""
    site = SiteConfig.load(folder, check=False)
    with _idle(site):
        known = _studies(site)
        if study and study not in known:
            raise RunError(f"{study!r} is not a study of this site; its studies are {', '.join(known) or 'none'}")
        return _leave(site, [study] if study else known, federation=not study)


def withdraw(folder: Path, case: str) -> list[str]:
    """Withdraw a case: no later study sees it, and the site leaves all studies that it took part in so far, which are
    returned."""
    site = SiteConfig.load(folder, check=False)
    with _idle(site):
        if case in withdrawn_cases(site.state):
            raise RunError(f"the case {case!r} was withdrawn before")
        _check_case(site, case)
        withdraw_case(site.state, case)  # first: whatever happens now, no study sees it
        return _leave(site, _studies(site), federation=False)


def _leave(site: SiteConfig, studies: Sequence[str], federation: bool) -> list[str]:
    log, mark = Ledger(site.state / "ledger.jsonl"), f"{datetime.now(UTC).isoformat(timespec='seconds')}\n"
    for each in studies:
        log.write({"kind": "leave", "study": each, "bytes": 0, "left": {}})
        place = site.state / "runs" / file_name(each)
        write_file(place / LEFT, lambda p: p.write_text(mark))  # from now on it refuses the study
        for inside in list(place.iterdir()):
            if inside.is_dir():
                shutil.rmtree(inside)
            elif inside.name not in (LEFT, "study.toml"):
                inside.unlink()
    if federation:
        log.write({"kind": "leave", "study": "", "bytes": 0, "left": {}})
        write_file(site.state / LEFT, lambda p: p.write_text(mark))
    return list(studies)


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


# at the coordinator


def remove(folder: Path, site: str, runs: Path) -> list[Path]:
    """Revoke the key of a hospital that leaves, and delete the models and memories that deployed runs below ``runs``
    hold of it alone; return their paths. It can be repeated."""
    project = Project.load(folder, check=False)
    if site not in project.names:
        raise DataError(f"{site!r} is no hospital of {folder / 'server.toml'}; {nearest(site, project.names)}")
    if site in project.sites:
        revoke(folder, site)
    found: list[Path] = []
    for file in sorted(runs.rglob(DEPLOYMENT)):
        try:
            sites = list(parse_json(file.read_text(encoding="utf-8"))["sites"])
        except (OSError, ValueError, KeyError, TypeError):  # not the folder of a run
            continue
        if site not in sites:
            continue
        run = RunFolder.open(file.parent)
        with run.alone():
            # models that only one hospital is served: KIND.SITE or KIND.SITE.group-K
            models = sorted((run.path / "models").glob("*.safetensors"))
            alone = [p for p in models if p.stem.partition(".")[2].split(".group-")[0] == file_name(site)]
            alone += sorted((run.path / "sites" / file_name(site)).glob("*"))
            for path in alone:
                path.unlink()
        found += alone
    return found
