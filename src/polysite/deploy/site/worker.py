"""The hospital's answers: cases, model and GPU stay warm in one process, which does what the policy allows.

All that may leave passes here. The policy is asked before anything is computed and again when the response is known,
and the ledger has a line about it before the response is handed to the courier. The site's memory lies in its state
folder, one file a version, written before the response leaves; so a worker that is killed continues as if it had not
been.

::

    STATE/format                       version of this layout; 0.1.0 wrote none
    STATE/ledger.jsonl                 what was asked and what left
    STATE/secret                       key of the pseudonyms
    STATE/withdrawn.txt                cases that no study may see any more
    STATE/left                         the federation was left; in the folder of a study: that study was left
    STATE/privacy.jsonl                what studies have spent of the privacy budget (``privacy_budget.py``)
    STATE/studies.jsonl                the studies that this hospital agreed to, with digests of their cases
    STATE/runs/STUDY/study.toml        the study that this hospital agreed to
    STATE/runs/STUDY/split.json        the part of every case, by digest, so that no change of the data moves a case
    STATE/runs/STUDY/memory/           the site's memory, by version
    STATE/runs/STUDY/phase-K           the model that phase K began from, and a copy
    STATE/runs/STUDY/KIND.count        how many requests of a kind were answered; "late": how many took too long
    STATE/runs/STUDY/secure/           keys of the current secure sum, and what left under masks (``masked_sums.py``)
    STATE/runs/STUDY/models/           the models that this hospital is served, best and last
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from polysite import assessment, config
from polysite.algorithms import names_of
from polysite.algorithms.base import facts
from polysite.buffers import Buffer
from polysite.data.case import SPLITS
from polysite.data.sources import Phantom, PhantomClasses, Source
from polysite.deploy.identity import difference
from polysite.deploy.project import SiteConfig
from polysite.deploy.protocol import effort_header, greeting_header, measures_header, parse_request, scores_header
from polysite.deploy.site.agreement import Agreed, Agreements, counted_as, leaves_of
from polysite.deploy.site.ledger import Ledger
from polysite.deploy.site.limits import (
    TimeIsUp,
    folder_size,
    time_limit,
)
from polysite.deploy.site.masked_sums import MaskedSums
from polysite.deploy.site.policy import GIGABYTE, Intent, Refusal, SitePolicy, obey
from polysite.deploy.site.privacy_budget import PrivacyBudget, for_patients
from polysite.deploy.site.pseudonyms import Pseudonyms
from polysite.deploy.site.studies import Studies
from polysite.deploy.site.withdrawn import why_left
from polysite.engines import checkpoint, site_memory
from polysite.engines.messages import (
    Asked,
    Assess,
    Begin,
    Begun,
    Examine,
    Greeting,
    HostRequest,
    Join,
    MaskTaken,
    MaskTurn,
    Measured,
    Models,
    Refused,
    Request,
    Response,
    Score,
    Scored,
    Serve,
    Train,
    Trained,
)
from polysite.engines.noise import release_of
from polysite.engines.run_folder import file_name
from polysite.engines.site_memory import Memory
from polysite.engines.site_turn import Turn
from polysite.errors import ConfigError, PayloadError, PolysiteError, RunError, shown
from polysite.payload import Payload, encode, model_digest, pack, plain
from polysite.privacy import Release
from polysite.site import Fit
from polysite.storage import private_folder, set_aside, write_file
from polysite.tree import Tree

log = logging.getLogger("polysite")

Header = dict[str, Any]
COMPARED = 1 << 20  # bytes that are compared at a time
STATE_FORMAT = 2  # of the state folder; 0.1.0 wrote 1, without saying so
# number of requests of a kind that count as one round of the policy: a server that was restarted repeats some requests,
# and it scores validation and test cases of a round
REPEATED: Mapping[str, int] = {"score": 4, "serve": 4, "mask": 8}  # a secure sum has four steps
MAX_LATE = 3  # requests of a study that took too long, after which it is refused
MAX_INCIDENTS = 16  # that are kept for the coordinator


@dataclass(frozen=True, slots=True)
class Leaving:
    """A response as it leaves: header, body, and what it holds, for the ledger."""

    header: Header = field(default_factory=dict)
    body: Buffer = b""
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and its response, which is given again if the request comes again, because the response was lost.

    The body of the request is kept rather than hashed: it is looked at only where the header came twice.
    """

    header: str = ""
    body: Buffer = b""
    leaving: Leaving = field(default_factory=Leaving)

    def is_to(self, header: str, body: Buffer) -> bool:
        """Whether this is the response to a request."""
        if self.header != header or len(self.body) != len(body):
            return False
        mine, other = (np.asarray(memoryview(b)) for b in (self.body, body))
        starts = range(0, len(mine), COMPARED)
        return all(np.array_equal(mine[k : k + COMPARED], other[k : k + COMPARED]) for k in starts)


class Worker:
    """Answers one request at a time.

    Args:
        site: The site's configuration.
        policy: What the hospital allows.
        now: The clock by which the policy's hours are kept.
    """

    def __init__(self, site: SiteConfig, policy: SitePolicy, now: Callable[[], datetime] = datetime.now):
        self.site, self.policy, self.now = site, policy, now
        _check_state(site.state)
        self.ledger = Ledger(site.state / "ledger.jsonl")
        self.pseudonyms = Pseudonyms(site.state / "secret")
        self.studies = Studies(site.state / "studies.jsonl")
        self.budget = PrivacyBudget(site.state)
        self.agreements = Agreements(site, self.pseudonyms, self.studies, self.source, self._note)
        self.incidents: list[str] = []  # sent to the coordinator with the next response
        self.agreed: Agreed | None = None
        self._last = Answered()
        self.words = "[data] names no cases: only rehearsals with generated patients are possible"
        if torch.cuda.is_available() and policy.gpu_share < 1:
            torch.cuda.set_per_process_memory_fraction(policy.gpu_share)

    def describe_data(self) -> None:
        """Count the hospital's cases, for the courier's screen; refuse data that cannot be read."""
        if self.site.data:
            source = self.source()
            count, where = sum(map(len, source.case_refs(0).values())), self.site.data.get("path", "drawings")
            self.words = f"{count} cases ({', '.join(source.modality_names)}) found in {where}"

    def source(self, wanted: Source | None = None) -> Source:
        """Return the hospital's own cases; for a rehearsal, generated ones, so that no patient is involved."""
        if isinstance(wanted, Phantom | PhantomClasses):
            return wanted
        if self.site.data:
            files = wanted is not None and self.site.data.get("name") == "files"
            wish = {"modalities": list(wanted.modality_names)} if wanted and files else {}
            return config.build({"data": {**wish, **self.site.data}}).data
        raise ConfigError(f"{self.site.path} names no data: fill in [data]")  # the coordinator's are never opened

    def answer(self, header: Mapping[str, Any], body: Buffer, incidents: Sequence[str] = ()) -> tuple[Header, Buffer]:
        """Return a response, or a sentence why there is none. It is in the ledger before it is returned.

        Args:
            header: Header of the request.
            body: Body of the request.
            incidents: What the courier has to report, sent along.
        """
        extra: Header = {"incidents": list(incidents)} if incidents else {}
        text = json.dumps(dict(header), sort_keys=True)
        self.incidents = []
        began, kind = time.perf_counter(), shown(header.get("kind"), 40)
        if self._last.is_to(text, body):
            leaving = self._last.leaving
            self._record(header, body, leaving, {**extra, "again": True})
            return {**leaving.header, **extra}, leaving.body
        try:
            leaving = self._answer(header, body)
        except (Refusal, ConfigError, PayloadError) as problem:
            leaving = Leaving({"refused": str(problem)})
        except PolysiteError as problem:  # it may name files and cases, which stay here
            log.error("%s: %s", kind, problem)
            leaving = Leaving({"error": "its data or its disk are not in order; its own log says why"})
            extra["local"] = str(problem)  # for the screen here; the courier removes it
        except Exception as problem:
            log.exception("%s", kind)
            leaving = Leaving({"error": f"it failed ({type(problem).__name__}); its own log says why"})
        leaving.header["seconds"] = time.perf_counter() - began
        if self.incidents:
            extra["incidents"] = [*incidents, *self.incidents][-MAX_INCIDENTS:]
        self._record(header, body, leaving, extra)
        leaving.header["left"] = json.dumps(dict(leaving.fields))
        if kind != "hello" and "error" not in leaving.header and "refused" not in leaving.header:
            self._last = Answered(text, body, leaving)
        return {**leaving.header, **extra}, leaving.body

    def _record(self, header: Mapping[str, Any], body: Buffer, leaving: Leaving, extra: Mapping[str, Any]) -> None:
        texts = sum(len(leaving.header.get(name, "")) for name in ("scores", "measures"))
        self.ledger.write(
            {
                **{name: shown(header.get(name, ""), 64) for name in ("study", "kind")},
                "from": self.site.server,
                **{name: given if type(given := header.get(name)) is int else -1 for name in ("round", "phase")},
                "got": len(body),
                "bytes": len(leaving.body) + texts,
                "left": dict(leaving.fields),
                **{k: leaving.header[k] for k in ("refused", "error") if k in leaving.header},
                **extra,
            }
        )

    def _note(self, what: str) -> None:
        """Report an incident in the log and, with the response, to the coordinator: it names no case and no file."""
        log.warning("%s", what)
        self.incidents.append(what)

    def _answer(self, header: Mapping[str, Any], body: Buffer) -> Leaving:
        """Return the response to a request, or refuse it when it takes longer than the policy allows."""
        study, request = parse_request(header, body)
        folder = self.agreements.folder(study)
        obey(why_left(self.site.state, folder))
        late = folder / "late.count"
        if late.exists() and late.stat().st_size >= MAX_LATE:
            raise Refusal(f"requests of this study took too long here: policy.toml says seconds = {self._seconds}")
        try:
            with time_limit(self.policy.seconds):
                return self._respond(header, study, request)
        except TimeIsUp:
            self.agreed = None  # what was interrupted may be half done
            if late.parent.is_dir():
                with late.open("ab") as file:
                    file.write(b".")
            raise Refusal(f"{request.kind} took too long here: policy.toml says seconds = {self._seconds}") from None

    @property
    def _seconds(self) -> str:
        return f"{self.policy.seconds:g}"

    def _respond(self, header: Mapping[str, Any], study: str, request: Request) -> Leaving:
        if isinstance(request, Join):
            odd = difference(header)
            if odd:
                raise Refusal(odd)
            return self._hello(study, request)
        agreed = self._find(study)
        self._allow(request, agreed)
        leaving = self._leaving(agreed, request)
        agreed.count(request.kind)  # only now: a request that failed has not used up a round
        return leaving

    def _leaving(self, agreed: Agreed, request: HostRequest) -> Leaving:
        """Return what leaves for a request that the policy allows."""
        match request:
            case Assess():
                return self._assess(agreed, request)
            case Train():
                return self._train(agreed, request)
        response = self._answer_of(agreed, request)
        match request, response:
            case Score(), Scored():
                found = Scored({self.pseudonyms.of(case): s for case, s in response.scores.items()})
                return Leaving(scores_header(found), fields=_listed("scores", len(found.scores), agreed, request))
            case Examine(), Measured():
                cases = tuple(replace(e, case=self.pseudonyms.of(e.case), prediction=None) for e in response.cases)
                fields = _listed("all measures", len(cases), agreed, request)
                return Leaving(measures_header(Measured(cases)), fields=fields)
            case Serve(), Models():
                return self._serve(agreed, request, cast(Sequence[Tree], response.models))
            case Begin(), Begun():
                return self._begin(agreed, request, response.start)
            case MaskTurn(), MaskTaken(payload=answer):
                return Leaving({}, encode(answer), dict.fromkeys(answer, "keys of a secure sum"))
        raise Refusal(f"this hospital does not answer {request.kind}")

    def _answer_of(self, agreed: Agreed, request: HostRequest) -> Response:
        """Return what the host answers, with this hospital's memory; raise what it refuses."""
        self._catch_up(agreed, request.before if isinstance(request, Begin) else request.phase)
        if isinstance(request, Score | Examine) and not request.split:
            raise Refusal("models are scored on validation and test cases only")
        memory = Payload() if isinstance(request, MaskTurn) else self._remembered(agreed, request)
        response = agreed.host.answer(replace(request, memory=memory))
        if isinstance(response, Refused):
            raise Refusal(response.reason)
        return response

    # agreement

    def _hello(self, id: str, request: Join) -> Leaving:
        known = self.agreements.folder(id) / "study.toml"
        if known.is_file() and known.read_text() != request.config:
            raise Refusal("this study was agreed to with other settings; another one needs another name")
        if self.agreed is None or self.agreed.id != id:
            if not known.exists():
                obey(self.policy.refuse(Intent("hello", studies=self.agreements.new_studies()), self.now()))
            self.agreed = None  # releases the memory before more is taken
            self.agreed = self._agree(id, request.config)
        revealed = "count" in self.policy.kinds  # otherwise only whether there are any
        counts = {k: len(self.agreed.splits[k]) if revealed else min(len(self.agreed.splits[k]), 1) for k in SPLITS}
        left = max(0, self.policy.studies - self.agreements.new_studies())
        names = {k: [case.name for case in self.agreed.splits[k]] for k in SPLITS}
        listed = self.pseudonyms.list_digest(id, names)
        policy = self.policy
        study = self.agreed.study
        may_assess = policy.may_assess(study.assess.private) and not assessment.is_unprotected(study)
        greeting = Greeting(counts, policy.case_scores, may_assess, *_machine(), studies=left, listed=listed)
        texts = dict.fromkeys(("torch and device", "policy", "keyed digest of the list of cases"), "text")
        fields = {**{k: f"count, {n}" for k, n in counts.items()}, **texts}
        return Leaving(greeting_header(greeting), fields=fields)

    def _find(self, id: str) -> Agreed:
        """Return the study that is asked for; after a restart, from disk."""
        if self.agreed is None or self.agreed.id != id:
            file = self.agreements.folder(id) / "study.toml"
            if not file.is_file():
                raise Refusal("this study has not been agreed to here")
            self.agreed = None
            self.agreed = self._agree(id, file.read_text())
        return self.agreed

    def _agree(self, id: str, text: str) -> Agreed:
        return self.agreements.agree(id, text, self.policy, self.now())

    def _make_room(self, agreed: Agreed, count: int) -> None:
        """Refuse to write more bytes for a study than the policy allows it on the disk."""
        if folder_size(agreed.folder) + count > self.policy.disk * GIGABYTE:
            most = f"{self.policy.disk:g}"
            raise Refusal(f"the files of this study take too much space here: policy.toml says disk = {most}")

    def _allow(self, request: HostRequest, agreed: Agreed) -> None:
        """Ask the policy about a request, with the rounds as this hospital counts them."""
        phases = agreed.host.phases
        asked = (request.phase, request.before) if isinstance(request, Begin) else (request.phase,)
        if unknown := [number for number in asked if number not in phases]:
            raise Refusal(f"the study has no phase {unknown[0] + 1}")
        assess, algorithm = agreed.study.assess, phases[request.phase].algorithm
        describes = isinstance(request, Assess)
        splits = SPLITS if describes and assess.cases == "all" else SPLITS[:1]
        leaves = leaves_of(assess if describes else algorithm) if isinstance(request, Assess | Train) else {}
        for name in ("assess",) if describes else names_of(algorithm):
            intent = Intent(
                kind=request.kind,
                algorithm=name,
                round=max(request.round, agreed.done(request.kind) // REPEATED.get(counted_as(request.kind), 2)),
                cases=sum(len(agreed.volumes[split]) for split in splits),
                leaves=leaves,
                case_scores=isinstance(request, Score | Examine),
                noise=assess.private,
            )
            obey(self.policy.refuse(intent, self.now()))

    def _assess(self, agreed: Agreed, request: Assess) -> Leaving:
        algorithm: Any = agreed.study.assess
        if assessment.is_unprotected(agreed.study):
            raise Refusal(assessment.UNPROTECTED)
        if algorithm.release:  # before any case is opened
            obey(self.budget.refuse(self.policy.epsilon, self.policy.delta, [algorithm.release]))
        turn = self._turn(agreed, request)
        leaving = self._reply(turn, len(agreed.volumes["train"]))
        self._spend(agreed, request, algorithm.private.on, turn.releases)
        return leaving

    def _turn(self, agreed: Agreed, request: Assess | Train) -> Turn:
        response = self._answer_of(agreed, request)
        if not isinstance(response, Trained) or response.turn is None:
            raise Refusal(f"this hospital does not answer {request.kind}")
        return response.turn

    def _train(self, agreed: Agreed, request: Train) -> Leaving:
        phase = agreed.host.phases[request.phase]
        algorithm, private = phase.algorithm, phase.private
        if not phase.site.size:
            raise Refusal("it has no training cases")
        sums = MaskedSums(agreed.folder, self.site, self.policy) if phase.masked else None
        if sums:
            sums.joined(request)
        kept = sums.kept_reply(request) if sums else None
        if kept:  # the request comes again, after a restart of this process
            return Leaving(kept[0], kept[2], kept[1])
        if private.on:
            obey(self.budget.refuse(self.policy.epsilon, self.policy.delta))
        release = release_of(algorithm, request.payload)
        if private.unit == "patient" and release:  # sums of statistics: before anything is computed
            obey(self.budget.refuse(self.policy.epsilon, self.policy.delta, [release]))
        turn = self._turn(agreed, request)
        behind = _cases_behind(turn.fits, agreed)
        hidden = facts(algorithm).cost_split == "validation" and not self.policy.case_scores
        # where no score of a single case may leave, a cost of validation cases must not stand for one case either
        leaving = self._reply(turn, behind, {"cost": len(agreed.volumes["validation"]) if hidden else behind})
        # counts of an algorithm with noise on its sums are of validation cases, or public
        counted = facts(algorithm).noisy_sums and set(turn.reply) <= {"counts", "weight"}
        if turn.reply and not counted:
            self._spend(agreed, request, private.on, for_patients(private, turn.releases))
        self._remember(agreed, request, turn.memory)
        told = behind >= self.policy.fewest and {"cost", "number"} <= set(self.policy.kinds)
        if told and (turn.fits or turn.releases):
            effort = effort_header(Trained(fits=_together(turn.fits), releases=turn.releases))
            what = "steps, learning rates, noise" if turn.releases else "loss, steps, learning rates"
            fields = {**leaving.fields, what: "cost and number"}
            leaving = replace(leaving, header={**leaving.header, **effort}, fields=fields)
        if sums:
            self._make_room(agreed, len(leaving.body))
            sums.keep_reply(request, leaving.header, leaving.fields, leaving.body)
        return leaving

    def _spend(self, agreed: Agreed, request: Asked, promised: bool, used: Sequence[Release]) -> None:
        """Take a reply from the hospital's privacy budget before it leaves; refuse it if that is spent."""
        if not promised:
            return
        if not used:
            raise Refusal("the reply has no noise, and this study promises some: it does not leave")
        obey(self.budget.refuse(self.policy.epsilon, self.policy.delta, used))
        self.budget.note(agreed.id, request.phase, request.round, used)

    def _serve(self, agreed: Agreed, request: Serve, models: Sequence[Tree]) -> Leaving:
        folder = agreed.folder / "models"
        for k, model in enumerate(models if request.name else ()):
            arrays = {n: plain(v) for n, v in model.items()}
            group = f".group-{k}" if len(models) > 1 else ""
            self._make_room(agreed, sum(int(a.nbytes) for a in arrays.values()))
            private_folder(folder)
            write_file(
                folder / f"{file_name(request.name)}{group}.safetensors",
                lambda draft, a=arrays: draft.write_bytes(pack(a)),  # type: ignore[misc]
            )
        return Leaving({"digests": list(map(model_digest, models))}, fields={"digest of the model": "number"})

    def _begin(self, agreed: Agreed, request: Begin, model: Tree) -> Leaving:
        start = Memory(self.site.name, "start", request.begins, Payload(model=model))
        self._make_room(agreed, 2 * start.content.nbytes)
        for file in self._start_files(agreed, request.phase):
            site_memory.save(file, start)
        return Leaving()

    # what the answers share

    def _catch_up(self, agreed: Agreed, phase: int) -> None:
        """After a restart, begin a phase again from the model that it began from."""
        if not agreed.host.has_begun(phase):
            start = self._started(agreed, phase)
            agreed.host.enter(phase, start.version, start.content["model"])

    @staticmethod
    def _start_files(agreed: Agreed, phase: int) -> tuple[Path, Path]:
        """Return the file with the model that a phase began from, which is not sent again, and a copy of it."""
        return agreed.folder / f"phase-{phase}.safetensors", agreed.folder / f"phase-{phase}.copy.safetensors"

    def _started(self, agreed: Agreed, phase: int) -> Memory:
        """Return what a phase began from; if the file is damaged, from the copy."""
        first, copy = self._start_files(agreed, phase)
        site = agreed.host.phases[phase].site
        try:
            return site_memory.load_any(first, site.lift)
        except checkpoint.Damaged as problem:
            found = site_memory.load_any(copy, site.lift)
            log.error("%s", problem)
            set_aside(first)
            self._note(f"the model that phase {phase + 1} began from was damaged: it goes on from the copy")
            return found

    def _reply(self, turn: Turn, cases: int, behind: Mapping[str, int] = MappingProxyType({})) -> Leaving:
        """Return the encoded reply of a turn, if everything in it may leave.

        Args:
            turn: The turn, after all outgoing steps.
            cases: Number of cases behind the reply.
            behind: Number of cases behind single fields, where it is smaller.
        """
        masked = any(step.reveals == "sum" for step in turn.steps)
        odd = sorted(turn.reply.keys() - turn.kinds.keys() - ({"weight"} if masked else set()))
        if odd:
            raise Refusal(f"the answer holds {odd[0]!r}, which the algorithm does not announce")
        obey(self.policy.refuse_reply(turn.kinds, cases, behind=behind))
        sizes = {
            name: 8 if isinstance(v, float) else sum(int(x.nbytes) for x in v.values())
            for name, v in turn.reply.items()
        }
        under = ", masked" if masked else ""
        fields = {name: f"{turn.kinds.get(name, 'one')}{under}, {size} bytes" for name, size in sizes.items()}
        return Leaving({}, encode(turn.reply), fields)

    def _memory_file(self, agreed: Agreed, version: int) -> Path:
        return agreed.folder / "memory" / f"round-{version:06d}.safetensors"

    def _remembered(self, agreed: Agreed, request: Asked) -> Payload:
        if request.version < 0:
            return Payload()
        phase = request.before if isinstance(request, Begin) else request.phase
        path, owner = self._memory_file(agreed, request.version), _owner(agreed, phase)
        try:
            return site_memory.load(path, self.site.name, owner, request.version, agreed.host.phases[phase].site.lift)
        except checkpoint.Damaged as problem:
            log.error("%s", problem)
            return self._recovered(agreed, request, phase, path)

    def _recovered(self, agreed: Agreed, request: Asked, phase: int, path: Path) -> Payload:
        """Return the newest sound memory before a damaged one, or an empty one, as of a site that has just joined.

        The damaged file is renamed. The version of a memory is the last round that counted, so an earlier one is that
        of a site that missed the rounds since then.
        """
        set_aside(path)
        what = f"its memory of round {request.version + 1} was damaged"
        names = sorted(agreed.folder.glob("memory/round-*.safetensors"), reverse=True)
        earlier = [version for name in names if (version := _version(name)) < request.version]
        for version in earlier:
            with suppress(RunError):  # damaged, too, or of another phase
                lift = agreed.host.phases[phase].site.lift
                file = self._memory_file(agreed, version)
                found = site_memory.load(file, self.site.name, _owner(agreed, phase), version, lift)
                self._note(f"{what}: it goes on from that of round {version + 1}")
                return found
        self._note(f"{what}: it goes on as if it had just joined")
        return Payload()

    def _remember(self, agreed: Agreed, request: Train, content: Payload) -> None:
        """Write the new memory before the response leaves; delete versions that no checkpoint of the server needs."""
        memory = Memory(self.site.name, _owner(agreed, request.phase), request.round, content)
        self._make_room(agreed, content.nbytes)
        site_memory.save(self._memory_file(agreed, request.round), memory)
        for path in (agreed.folder / "memory").glob("round-*.safetensors"):
            if _version(path) not in {*request.keep, request.version, request.round}:
                path.unlink()


def _check_state(state: Path) -> None:
    """Refuse the state folder of a later version; that of 0.1.0 has the same layout and is marked as current."""
    file = state / "format"
    given = file.read_text().strip() if file.exists() else "1"
    if given not in map(str, range(1, STATE_FORMAT + 1)):
        raise ConfigError(
            f"{state} has format {shown(given, 20)}, and this polysite reads up to {STATE_FORMAT}: install a newer one"
        )
    if given != str(STATE_FORMAT):
        private_folder(state)
        write_file(file, lambda p: p.write_text(f"{STATE_FORMAT}\n"))


def _listed(what: str, count: int, agreed: Agreed, request: Score | Examine) -> dict[str, str]:
    classes = ", with their true classes" if agreed.study.data.task == "classification" else ""
    return {f"{what} of {count} {request.split} cases{classes}": "number, under pseudonyms"}


def _owner(agreed: Agreed, phase: int) -> str:
    """Return the owner of a memory. Another phase, which might send the memory away, must not read it."""
    return f"{'/'.join(names_of(agreed.host.phases[phase].algorithm))} in phase {phase + 1}"


def _cases_behind(fits: Sequence[Fit], agreed: Agreed) -> int:
    """Return the smallest number of training cases that influence a fit; slices of a volume count as one, and so do
    the mini-batches of a round."""
    batches = [f.cases for f in fits if f.minibatch]
    seen = [f.cases for f in fits if not f.minibatch] + ([frozenset().union(*batches)] if batches else [])
    volume = {case.name: case.source for case in agreed.splits["train"]}
    return min((len({volume.get(n, n) for n in names}) for names in seen), default=len(agreed.volumes["train"]))


def _version(path: Path) -> int:
    """Return the version in the name of a memory's file."""
    return int(path.stem.rpartition("-")[2])


def _together(fits: Sequence[Fit]) -> tuple[Fit, ...]:
    """Return the fits as they may be reported: the mini-batches of a round as one, since each may be a single case."""
    batches = [f for f in fits if f.minibatch]
    steps = sum(f.steps for f in batches)
    if not steps:
        return tuple(fits)
    loss = math.fsum(f.loss * f.steps for f in batches) / steps
    lr_sum, reach = (math.fsum(getattr(f, name) for f in batches) for name in ("lr_sum", "reach"))
    whole = replace(batches[-1], loss=loss, steps=steps, lr_sum=lr_sum, reach=reach)
    return (*(f for f in fits if not f.minibatch), whole)


def _machine() -> tuple[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return str(torch.__version__), gpu or "cpu"
