"""Real hospitals for an advice: every training is a study of its own at the hospitals that connect.

The course is that of a simulation (``advise.py``), and so are the numbers. The coordinator plans with the numbers of
cases that hospitals report when they are assessed, each case as if it were a patient of its own. Hospitals split their
cases by the seed, so that no name of a case crosses; scores come under pseudonyms, which are the same in all studies.

A training goes on from the first phases of another one, unless these left memories at the hospitals, which belong to
one study: then it begins anew. Every round waits for all hospitals, because strategies are compared case by case. What
needs models of several runs at one place, or sums that no hospital reveals, is left out.
"""

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from polysite import config, study
from polysite.advice.advise import advise, given
from polysite.advice.contenders import contenders
from polysite.advice.deliver import WATCHING
from polysite.advice.result import Advice
from polysite.advice.stages import runs_of
from polysite.assessment import UNPROTECTED, is_unprotected
from polysite.benchmark.jobs import Job, Step, silent
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.sources import AtHospitals, Counted
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.coordinator.posted import Post
from polysite.engines.run_folder import RunFolder
from polysite.engines.sites import Deadlines, Sites
from polysite.errors import ConfigError, PolysiteError, RunError
from polysite.foreign import parse_json
from polysite.heterogeneity.verdict import Verdict
from polysite.storage import write_file
from polysite.study.estimate import exchanged

CHANGED = "the cases of a hospital have changed since this advice began; begin another one in another --out"
LIKE = 5  # cases by which trainings differ, at least, where a hospital's policy has the usual ``fewest``
FILE = "hospitals.json"  # the name by which hospitals know the advice, and their cases as they joined


@dataclass
class Connected:
    """The hospitals of a project, as an advice sees them.

    Args:
        base: The study, with the data as hospitals know them.
        post: Carries the messages.
        sites: The hospitals that take part, while they are assessed.
        id: Name by which hospitals know the advice.
        out: Folder of the advice.
        step: Reports progress.
        deadlines: How long to wait for hospitals.
        wait: Seconds to wait for all of them.
    """

    base: Study
    post: Post
    sites: Sites
    id: str
    out: Path
    step: Step
    deadlines: Deadlines
    wait: float
    left: dict[str, int] = field(init=False)  # further studies that every hospital allows within a day
    scored: dict[int, Any] = field(default_factory=dict)  # cases of every inner fold, by hospital

    def __post_init__(self) -> None:
        self.left = {i: s.greeting.studies for i, s in self.sites.status.items() if s.greeting}

    @classmethod
    def join(
        cls,
        chosen: Study,
        post: Post,
        names: Sequence[str],
        out: Path,
        step: Step = silent,
        *,
        deadlines: Deadlines = Deadlines(),
        wait: float = coordinator.WAIT,
    ) -> "Connected":
        """Return the hospitals that connect and do not refuse; each takes part to the end.

        Args:
            chosen: The study; its test cases are never used.
            post: Carries the messages.
            names: The hospitals of the project.
            out: Folder of the advice; an interrupted one is continued with its hospitals.
            step: Reports progress.
            deadlines: How long to wait for hospitals.
            wait: Seconds to wait for all of them, once there is a quorum.
        """
        base = given(coordinator.guarded(chosen))
        check(base)
        known = _known(out / FILE)
        id = str(known["study"]) if known else secrets.token_hex(8)
        step("waiting for the hospitals", 0)
        if known:
            names, deadlines = list(known["sites"]), replace(deadlines, quorum=len(known["sites"]))
        sites = coordinator.joined(base, post, names, deadlines, wait, id)
        if known and _listed(sites) != known["sites"]:
            raise RunError(CHANGED)
        hidden = [site for site, status in sites.status.items() if status.greeting and not status.greeting.may_score]
        if hidden:
            raise ConfigError(
                f"strategies are compared by the scores of single cases, and the policy of {hidden[0]} says "
                "case_scores = false"
            )
        return cls(base, post, sites, id, out, step, replace(deadlines, quorum=len(sites.status)), wait)

    def advise(self, trainings: float | None, inner: int = 3, only: Sequence[str] = ()) -> Advice:
        """Return which strategy every hospital should use, from trainings at the hospitals.

        Args:
            trainings: The budget, in whole trainings of FedAvg; None for what the strategies take, without any models.
            inner: Number of inner folds.
            only: Strategies to compare, by name; empty for all.
        """

        def assess(base: Study, folder: Path) -> Verdict:
            found = self._assess(base, folder)
            trained = sum(status.cases["train"] for status in self.sites.status.values())
            self._announce(base, inner, len(contenders(found, base, trained, only)))
            return found

        found = advise(_counted(self.base, self.sites), self.out, trainings, inner, only, self, assess, members=1)
        for recipe in (found.recipe, *found.exceptions):  # to be trained at the hospitals
            text = config.dump(study.pinned(replace(recipe.study, data=self.base.data)))
            write_file(self.out / f"{recipe.file('study')}.toml", lambda path, text=text: path.write_text(text))  # type: ignore[misc]
        return found

    def _assess(self, base: Study, folder: Path) -> Verdict:
        text = json.dumps({"study": self.id, "sites": _listed(self.sites)}, indent=1)
        write_file(self.out / FILE, lambda path: path.write_text(text + "\n"))
        found = coordinator.assess_sites(replace(base, data=self.base.data), self.sites, folder)
        if found is None:
            raise RunError(f"an advice begins with an assessment: {self.sites.incidents()[-1]['what']}")
        return found.verdict

    def _announce(self, base: Study, inner: int, strategies: int) -> None:
        """Say what the advice asks of the hospitals; refuse it if they do not allow enough studies."""
        least, most = runs_of(strategies, inner)
        words = f"this advice takes {least} to {most} studies at every hospital"
        self._allow(least, words)
        for remark in (f"{words}; {self._allowed}", *_close(base, inner)):
            self.step(remark, 0)

    @property
    def _allowed(self) -> str:
        each = ", ".join(f"{site} {count}" for site, count in self.left.items())
        return f"policies allow so many new ones within the next 24 hours (studies in policy.toml): {each}"

    def _allow(self, count: int, words: str) -> None:
        if any(0 <= left < count for left in self.left.values()):
            raise RunError(
                f"{words}; {self._allowed}. Ask for more, name fewer strategies with --only, or give the same command "
                "again tomorrow"
            )

    def train(self, jobs: Sequence[Job]) -> Mapping[str, str]:
        """Train the study of every job, unless that is done; return why some failed, by title."""
        done = [job for job in jobs if job.done]
        waiting = sorted((job for job in jobs if job not in done), key=lambda job: len(job.study.then))
        new = sum(not job.run.exists() for job in waiting)
        self._allow(new, f"the next {new} trainings are a study each")
        failed: dict[str, str] = {}
        for job in waiting:
            self.step(job.title, 0)
            try:
                self._train(job, job.first(done))
                done.append(job)
            except PolysiteError as problem:
                failed[job.title] = str(problem)
            self.step(f"{job.title}: {'failed' if job.title in failed else 'done'}")
        for job in done:
            self._compare(job)
        return failed

    def _train(self, job: Job, before: Job | None) -> None:
        more: dict[str, Any] = {"deadlines": self.deadlines, "wait": self.wait, "evaluate": job.evaluate}
        if job.run.exists():
            coordinator.resume(job.run, self.post, **more)
            return
        self.left = {site: count - 1 for site, count in self.left.items()}
        after = RunFolder(before.run) if before and not _leaves_memories(before.study) else None
        chosen = replace(job.study, data=self.base.data)
        id = hashlib.sha256(f"{self.id} {job.root.name} {job.place}".encode()).hexdigest()[:16]
        coordinator.run(chosen, self.post, list(self.sites.status), job.run, assess=False, id=id, after=after, **more)

    def _compare(self, job: Job) -> None:
        """Refuse scores of an inner fold that are of other cases than those of the runs before."""
        if job.study.split.inner:
            cases = {site: set(scores) for site, scores in RunFolder(job.run).result.scores.items()}
            if self.scored.setdefault(job.fold, cases) != cases:
                raise RunError(f"{job.title} scored other cases than the runs before: {CHANGED}")


def check(base: Study) -> None:
    """Refuse a study that real hospitals cannot be advised on."""
    coordinator.check(base)
    if is_unprotected(base):
        raise ConfigError(UNPROTECTED)
    if base.slices.axis:
        raise ConfigError("the number of slices is known at the hospitals alone, and an advice plans with it: [slices]")


def _counted(base: Study, sites: Sites) -> Study:
    """Return the study with data in which the hospitals' cases are only counted; generated ones are the same here."""
    if not isinstance(base.data, AtHospitals):
        return base
    sizes = {site: sum(status.cases.values()) for site, status in sites.status.items()}
    data = base.data
    return replace(base, data=Counted(sizes, data.modalities, data.labels, data.dims, data.task))


def _close(base: Study, inner: int) -> Iterator[str]:
    """Yield a sentence for every hospital at which two trainings of an advice see nearly the same cases."""
    short = replace(base.split, validation=min(base.split.validation, WATCHING))
    folds = [replace(base.split, inner=inner, inner_fold=k) for k in range(inner)]
    dealt = [study.deal_cases(replace(base, split=split)) for split in (base.split, short, *folds)]
    for site in dealt[0]:
        trained = [{case.name for case in splits[site]["train"]} for splits in dealt]
        apart = min((len(a ^ b) for a, b in combinations(trained, 2) if a != b), default=LIKE)
        if apart < LIKE:
            yield (
                f"at {site}, two trainings of this advice differ by {apart} cases: its policy refuses the second one "
                f"if it says fewest = {apart + 1} or more ({LIKE} by default) and not similar_days = 0"
            )


def _listed(sites: Sites) -> dict[str, Any]:
    """Return the numbers of cases of every hospital, and the keyed digest of their list."""
    greeted = {site: status.greeting for site, status in sites.status.items() if status.greeting}
    return {site: {**{k: g.cases[k] for k in SPLITS}, "listed": g.listed} for site, g in greeted.items()}


def _known(file: Path) -> dict[str, Any] | None:
    """Return what is known of an advice that has begun; None if none has."""
    if not file.exists():
        return None
    try:
        known = parse_json(file.read_bytes())
        return {"study": str(known["study"]), "sites": dict(known["sites"])}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(f"{file} cannot be read: {problem}; begin another advice in another --out") from problem


def _leaves_memories(chosen: Study) -> bool:
    """Whether sites of a study remember something from one round to the next."""
    sizes = {site: len(splits["train"]) for site, splits in study.deal_cases(chosen).items() if splits["train"]}
    params = study.initial_params(chosen)
    return any(exchanged(phase, params, sizes)[1] for phase in config.phases(chosen))
