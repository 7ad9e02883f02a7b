"""The hospital's own side: data, model and GPU stay warm in one process, which answers what the policy allows.

All that may leave passes here: the policy is asked before anything is computed and once more when the answer is known,
and the ledger has a line about it before the answer is handed to the courier. What the site remembers lies in its state
folder, a file a version, written before the answer leaves; so a worker that is killed goes on as if it had not been.

::

    STATE/ledger.jsonl                 what was asked and what left
    STATE/secret                       by which cases get numbers instead of names
    STATE/runs/STUDY/study.toml        what this hospital agreed to
    STATE/runs/STUDY/memory/           what the site remembers, by version
    STATE/runs/STUDY/phase-K           what phase K began from
    STATE/runs/STUDY/KIND.count        how often what was answered
    STATE/runs/STUDY/models/           the models that this hospital is served, best and last
"""

import fcntl
import hashlib
import hmac
import json
import logging
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from polysite import assessment, config, study
from polysite.algorithms import names_of
from polysite.algorithms.base import Algorithm, Kind
from polysite.algorithms.cfft import Cfft
from polysite.algorithms.cost_weighted import FedCostWAvg, FedPIDAvg, TopK
from polysite.algorithms.l2gd import L2gd
from polysite.config import Study
from polysite.data.case import SPLITS
from polysite.data.sources import Phantom, PhantomClasses, Source
from polysite.data.split import SiteSplit
from polysite.deploy.coordinator.remote import PROTOCOL, digest
from polysite.deploy.identity import difference
from polysite.deploy.project import SiteConfig
from polysite.deploy.protocol import Question
from polysite.deploy.site import ipc
from polysite.deploy.site.ledger import Ledger
from polysite.deploy.site.policy import Ask, SitePolicy
from polysite.engines import checkpoint, site_memory
from polysite.engines.compress import Compress, squeeze
from polysite.engines.reply_checks import kinds_of
from polysite.engines.run_folder import file_name
from polysite.engines.site_memory import Memory
from polysite.errors import ConfigError, DataError, PayloadError, PolysiteError, RunError, shown
from polysite.models.encoders import Bundled
from polysite.payload import Payload, decode, encode, plain
from polysite.site import Fit
from polysite.storage import write_file
from polysite.training.torch_site import TorchSite
from polysite.tree import Tree

log = logging.getLogger("polysite")

Header = dict[str, Any]
Costs = FedCostWAvg | FedPIDAvg | TopK  # whose cost is that of the validation cases
DAY = 86400.0  # seconds
IDLE = 600.0  # seconds without a courier after which an orphan goes


class Refusal(PolysiteError):
    """What this hospital does not do, and why: it leaves as a sentence."""


@dataclass
class Agreed:
    """A study that this hospital takes part in, with its cases prepared."""

    id: str
    study: Study  # with this hospital's data
    parts: SiteSplit
    stages: list[tuple[Algorithm[Any], TorchSite]]  # of every phase
    folder: Path
    begun: set[int] = field(default_factory=lambda: {0})

    def done(self, kind: str) -> int:
        """How often this has been answered here, as this hospital counts it."""
        file = self.folder / f"{kind}.count"
        return file.stat().st_size if file.exists() else 0

    def count(self, kind: str) -> None:
        """Once more: a mark in a file."""
        with (self.folder / f"{kind}.count").open("ab") as file:
            file.write(b".")


class Worker:
    """Answers one question at a time."""

    def __init__(self, site: SiteConfig, policy: SitePolicy, now: Callable[[], datetime] = datetime.now):
        self.site, self.policy, self.now = site, policy, now
        self.ledger = Ledger(site.state / "ledger.jsonl")
        self.agreed: Agreed | None = None
        self._last: tuple[str, Header, bytes, dict[str, str]] = ("", {}, b"", {})  # the last answer, should it get lost
        self._secret = _secret(site.state / "secret")
        self.words = "[data] names no cases: only rehearsals with drawn patients are possible"
        if torch.cuda.is_available() and policy.gpu_share < 1:
            torch.cuda.set_per_process_memory_fraction(policy.gpu_share)

    def source(self, wanted: Source | None = None) -> Source:
        """The hospital's own cases; for a rehearsal those that it draws, so that no patient is in it."""
        if isinstance(wanted, Phantom | PhantomClasses):
            return wanted
        if self.site.data:
            files = wanted is not None and self.site.data.get("name") == "files"
            wish = {"modalities": list(wanted.modality_names)} if wanted and files else {}
            return config.build({"data": {**wish, **self.site.data}}).data
        raise ConfigError(f"{self.site.path} names no data: fill in [data]")  # those of a coordinator are not opened

    def answer(self, header: Mapping[str, Any], body: bytes, incidents: Sequence[str] = ()) -> tuple[Header, bytes]:
        """What leaves: an answer, or a sentence why there is none. It is in the ledger before it is returned. With it
        goes what the courier has to say of itself."""
        told: Header = {"incidents": list(incidents)} if incidents else {}
        digested = hashlib.sha256(json.dumps(dict(header), sort_keys=True).encode())
        digested.update(body)
        key = digested.hexdigest()
        began, kind = time.perf_counter(), shown(header.get("kind"), 40)
        if key == self._last[0]:
            got, out, fields = self._last[1:]
            self._record(header, body, got, out, {**told, "again": True}, fields)
            return {**got, **told}, out
        try:
            got, out, fields = self._answer(header, body)
        except (Refusal, ConfigError, PayloadError) as problem:
            got, out, fields = {"refused": str(problem)}, b"", {}
        except PolysiteError as problem:  # it may name files and cases, which is nobody's business
            log.error("%s: %s", kind, problem)
            got, out, fields = {"error": "its data or its disk are not in order; its own log says why"}, b"", {}
            told["mine"] = str(problem)  # for the screen here; the courier keeps it
        except Exception as problem:
            log.exception("%s", kind)
            got, out, fields = {"error": f"it failed ({type(problem).__name__}); its own log says why"}, b"", {}
        got["seconds"] = time.perf_counter() - began
        self._record(header, body, got, out, told, fields)
        got["left"] = json.dumps(fields)
        if kind != "hello" and "error" not in got and "refused" not in got:
            self._last = key, got, out, fields
        return {**got, **told}, out

    def _record(
        self,
        header: Mapping[str, Any],
        body: bytes,
        got: Header,
        out: bytes,
        told: Mapping[str, Any],
        fields: Mapping[str, str],
    ) -> None:
        self.ledger.write(
            {
                **{name: shown(header.get(name, ""), 64) for name in ("study", "kind")},
                "from": self.site.server,
                **{name: found if type(found := header.get(name)) is int else -1 for name in ("round", "phase")},
                "got": len(body),
                "bytes": len(out) + len(got.get("scores", "")),
                "left": fields,
                **{k: got[k] for k in ("refused", "error") if k in got},
                **told,
            }
        )

    def _answer(self, header: Mapping[str, Any], body: bytes) -> tuple[Header, bytes, dict[str, str]]:
        if header.get("protocol") != PROTOCOL:
            theirs = shown(header.get("protocol"), 40)
            raise Refusal(f"it is asked in protocol {theirs}, and speaks {PROTOCOL}; install the same")
        asked = Question.parse(header)
        if asked.kind == "hello":
            odd = difference(header)
            if odd:
                raise Refusal(odd)
            return self._hello(asked)
        agreed = self._find(asked.study)
        self._allow(asked, agreed)
        answers = {
            "assess": self._assess,
            "train": self._train,
            "score": self._score,
            "serve": self._serve,
            "begin": self._begin,
        }
        found = answers[asked.kind](agreed, asked, body)
        agreed.count(asked.kind)  # not before: a hospital whose disk is full for a night has not used up its rounds
        return found

    # what is asked before anything else

    def _hello(self, asked: Question) -> tuple[Header, bytes, dict[str, str]]:
        known = self._folder(asked.study) / "study.toml"
        if known.is_file() and known.read_text() != asked.config:
            raise Refusal("this study was agreed to with other settings; another one needs another name")
        if self.agreed is None or self.agreed.id != asked.study:
            if not known.exists():
                self._obey(self.policy.refuse(Ask("hello", studies=self._new()), self.now()))
            self.agreed = None  # lets go of the memory before more is taken
            self.agreed = self._agree(asked.study, asked.config)
        told = "count" in self.policy.kinds  # otherwise no more than whether there are any
        counts = {part: len(p) if told else min(len(p), 1) for part in SPLITS for p in [self.agreed.parts[part]]}
        says = {"judges": self.policy.case_scores, "described": self.policy.assess}
        left = {**{part: f"count, {n}" for part, n in counts.items()}, "torch and device": "text", "policy": "text"}
        return {**counts, **says, **_machine()}, b"", left

    def _new(self) -> int:
        """How many studies were agreed to since yesterday."""
        files = (self.site.state / "runs").glob("*/study.toml")
        return sum(time.time() - f.stat().st_mtime < DAY for f in files)

    def _find(self, id: str) -> Agreed:
        """The study that is asked for; after a restart, from disk."""
        if self.agreed is None or self.agreed.id != id:
            file = self._folder(id) / "study.toml"
            if not file.is_file():
                raise Refusal("this study has not been agreed to here")
            self.agreed = None
            self.agreed = self._agree(id, file.read_text())
        return self.agreed

    def _folder(self, id: str) -> Path:
        return self.site.state / "runs" / file_name(id)

    def _agree(self, id: str, text: str) -> Agreed:
        """Take part, if everything that the study will ask is within the policy and the data are what it wants."""
        wanted = config.parse(text, where="the study")
        for stage in config.phases(wanted):
            if stage.run.pooled:
                raise Refusal("run.pooled would bring all scans to one place; no scan leaves this site")
        if wanted.split.file:
            raise Refusal("split.file names a file of the coordinator's; the study must split by itself")
        if not isinstance(wanted.encoder, Bundled):
            raise Refusal("encoder.name names a file of the coordinator's; leave it out, for the one that is built in")
        try:
            mine = replace(wanted, data=self.source(wanted.data), train=replace(wanted.train, device=self.site.device))
            _fits(mine.data, wanted.data)
            patients = _patients(mine, self.site.name)
            parts = mine.split.apply({self.site.name: patients}, mine.split.seed_of(mine.seed))[self.site.name]
        except ConfigError as problem:  # of this hospital's own configuration: it may name files
            raise DataError(str(problem)) from problem
        self._check(mine, len(parts["train"]))
        folder = self._folder(id)
        (folder / "memory").mkdir(parents=True, exist_ok=True)
        if not (folder / "study.toml").exists():  # before there is work: it counts as a study, however it ends
            write_file(folder / "study.toml", lambda p: p.write_text(text))
        sites = study.build_sites(mine, {self.site.name: parts})
        host = sites[self.site.name]
        stages = [(self._strict(s.algorithm), host.under(s.train)) for s in config.phases(mine)]
        return Agreed(id, mine, parts, stages, folder)

    def _strict(self, algorithm: Algorithm[Any]) -> Algorithm[Any]:
        """The algorithm as it answers here: what it sums up is of as many cases as the policy wants, or of more."""
        if not isinstance(algorithm, Cfft):
            return algorithm
        fewest, least = (max(n, self.policy.fewest) for n in (algorithm.fewest, algorithm.least))
        return replace(algorithm, fewest=fewest, least=least)

    def _check(self, wanted: Study, cases: int) -> None:
        """Ask the policy about all that the study will want; rounds are counted through all phases."""
        stages = config.phases(wanted)
        rounds = sum(stage.run.rounds for stage in stages)
        seen = min(map(_fewest, stages))
        if seen < self.policy.fewest:
            raise Refusal(
                f"one training of this study may see {seen} cases, too few behind 'model': policy.toml says fewest = "
                f"{self.policy.fewest}; a larger train.batch, more steps or whole epochs would do"
            )
        for stage, name in ((s, name) for s in stages for name in names_of(s.algorithm)):
            ask = Ask(
                kind="hello",
                algorithm=name,
                round=rounds - 1,
                cases=cases,
                leaves=_leaves(stage.algorithm),
                case_scores=isinstance(stage.algorithm, Cfft),  # sums of scores, perhaps of one case
            )
            self._obey(self.policy.refuse(ask, self.now()))

    def _allow(self, asked: Question, agreed: Agreed) -> None:
        """Ask the policy; a server that was stopped repeats some, not all, and judges twice a round."""
        phases = range(len(agreed.stages))
        if asked.phase not in phases or asked.before not in phases:
            raise Refusal(f"the study has no phase {max(asked.phase, asked.before) + 1}")
        assess, algorithm = agreed.study.assess, agreed.stages[asked.phase][0]
        parts = SPLITS if asked.kind == "assess" and assess.cases == "all" else SPLITS[:1]
        repeated = 4 if asked.kind in ("score", "serve") else 2
        leaves = {"assess": _leaves(assess), "train": _leaves(algorithm)}.get(asked.kind, {})
        for name in ("assess",) if asked.kind == "assess" else names_of(algorithm):
            ask = Ask(
                kind=asked.kind,
                algorithm=name,
                round=max(asked.round, agreed.done(asked.kind) // repeated),
                cases=sum(len(agreed.parts[part]) for part in parts),
                leaves=leaves,
                case_scores=asked.kind == "score",
            )
            self._obey(self.policy.refuse(ask, self.now()))

    @staticmethod
    def _obey(reason: str | None) -> None:
        if reason:
            raise Refusal(reason)

    # the five functions

    def _assess(self, agreed: Agreed, asked: Question, body: bytes) -> tuple[Header, bytes, dict[str, str]]:
        assess = agreed.study.assess
        engine = assessment.assessed_sites(agreed.study, dealt={self.site.name: agreed.parts})
        reply, _ = assess.local(decode(body), Payload(), engine.sites[self.site.name])  # type: ignore[arg-type]
        return self._leave(assess, Payload(), reply, len(agreed.parts["train"]))

    def _train(self, agreed: Agreed, asked: Question, body: bytes) -> tuple[Header, bytes, dict[str, str]]:
        algorithm, site = agreed.stages[asked.phase][0], self._at(agreed, asked.phase, asked.round)
        if not site.size:
            raise Refusal("it has no training cases")
        got = decode(body).each(site.lift)
        reply, new = algorithm.local(got, self._remembered(agreed, asked, site), site)
        behind, compress = _behind(site.fits, site.size), config.phases(agreed.study)[asked.phase].run.compress
        few = isinstance(algorithm, Costs) and not self.policy.case_scores  # behind a cost is then no single case
        judges = len(agreed.parts["validation"]) if few else behind
        found, out, fields = self._leave(algorithm, got, reply, behind, compress, {"cost": judges})
        self._remember(agreed, asked, new)
        told = _together(site.fits)
        fits = {f"fit_{n}": [float(getattr(f, n)) for f in told] for n in ("loss", "steps", "lr_sum", "reach")}
        if not site.fits or behind < self.policy.fewest or not {"cost", "number"} <= set(self.policy.kinds):
            return found, out, fields
        return {**found, **fits}, out, {**fields, "loss, steps, learning rates": "cost and number"}

    def _score(self, agreed: Agreed, asked: Question, body: bytes) -> tuple[Header, bytes, dict[str, str]]:
        split = asked.split
        if not split:
            raise Refusal("models are judged by validation and test cases")
        site, groups = self._served(agreed, asked, asked.phase, body, split)
        scores = {case: s for params, cases in groups for case, s in site.score(params, cases).items()}
        named = {self.pseudonym(case): {k: float(v) for k, v in s.items()} for case, s in scores.items()}
        classes = ", with their true classes" if agreed.study.data.task == "classification" else ""
        left = {f"scores of {len(scores)} {split} cases{classes}": "number, under pseudonyms"}
        return {"scores": json.dumps(dict(sorted(named.items())))}, b"", left

    def _serve(self, agreed: Agreed, asked: Question, body: bytes) -> tuple[Header, bytes, dict[str, str]]:
        _, groups = self._served(agreed, asked, asked.phase, body, "validation")
        models, name = [params for params, _ in groups], asked.name
        for k, model in enumerate(models if name else ()):
            arrays = {n: plain(v) for n, v in model.items()}
            place = (
                agreed.folder / "models" / f"{file_name(name)}{f'.group-{k}' if len(models) > 1 else ''}.safetensors"
            )
            place.parent.mkdir(exist_ok=True)
            write_file(place, lambda p, a=arrays: _save(p, a))  # type: ignore[misc]
        return {"digests": [digest(model) for model in models]}, b"", {"digest of the model": "number"}

    def _begin(self, agreed: Agreed, asked: Question, body: bytes) -> tuple[Header, bytes, dict[str, str]]:
        phase = asked.phase
        _, groups = self._served(agreed, asked, asked.before, body, "validation")
        models = [params for params, _ in groups]
        if len(models) != 1:
            raise Refusal(f"phase {phase + 1} starts from one model, and this site has {len(models)}")
        start = Memory(self.site.name, "start", asked.begins, Payload(model=models[0]))
        site_memory.save(self._beginning(agreed, phase), start)
        self._enter(agreed, phase, asked.begins, models[0])
        return {}, b"", {}

    # what they have in common

    def _at(self, agreed: Agreed, phase: int, round: int) -> TorchSite:
        if phase not in agreed.begun:
            site = agreed.stages[phase][1]
            start: Memory = checkpoint.load(self._beginning(agreed, phase), site.lift)
            self._enter(agreed, phase, start.version, start.content["model"])
        return agreed.stages[phase][1].at(round)

    @staticmethod
    def _enter(agreed: Agreed, phase: int, begins: int, start: Tree) -> None:
        algorithm, site = agreed.stages[phase]
        agreed.stages[phase] = algorithm, site.begin(begins, site.lift(start))
        agreed.begun.add(phase)

    def _beginning(self, agreed: Agreed, phase: int) -> Path:
        return agreed.folder / f"phase-{phase}.safetensors"

    def _served(
        self, agreed: Agreed, asked: Question, phase: int, body: bytes, split: str
    ) -> tuple[TorchSite, list[tuple[Tree, tuple[str, ...]]]]:
        """Which parameters this site uses for which of its patients, given what it was sent."""
        site, asked = self._at(agreed, phase, asked.round), replace(asked, phase=phase)
        remembered = self._remembered(agreed, asked, site)
        algorithm = agreed.stages[phase][0]
        return site, list(algorithm.serve(decode(body).each(site.lift), remembered, site, site.cases(split)))

    def _leave(
        self,
        algorithm: Any,
        got: Payload,
        reply: Payload,
        cases: int,
        how: Compress = "none",
        behind: Mapping[str, int] = MappingProxyType({}),
    ) -> tuple[Header, bytes, dict[str, str]]:
        """The bytes of a reply, if all that is in it may leave."""
        kinds = kinds_of(algorithm.reply, got, reply)
        odd = sorted(reply.keys() - kinds.keys())
        if odd:
            raise Refusal(f"the answer holds {odd[0]!r}, which the algorithm does not announce")
        self._obey(self.policy.refuse_reply(kinds, cases, behind=behind))
        left = squeeze(how, kinds, got, reply)
        sizes = {
            name: 8 if isinstance(v, float) else sum(int(x.nbytes) for x in v.values()) for name, v in left.items()
        }
        return {}, encode(left), {name: f"{kinds[name]}, {sizes[name]} bytes" for name in reply}

    def _memory(self, agreed: Agreed, version: int) -> Path:
        return agreed.folder / "memory" / f"round-{version:06d}.safetensors"

    def _remembered(self, agreed: Agreed, asked: Question, site: TorchSite) -> Payload:
        if asked.version < 0:
            return Payload()
        path = self._memory(agreed, asked.version)
        return site_memory.load(path, self.site.name, _owner(agreed, asked.phase), asked.version, site.lift)

    def _remember(self, agreed: Agreed, asked: Question, new: Payload) -> None:
        """Written before the answer leaves; let go of what no checkpoint of the server needs."""
        made = Memory(self.site.name, _owner(agreed, asked.phase), asked.round, new)
        site_memory.save(self._memory(agreed, asked.round), made)
        for path in (agreed.folder / "memory").glob("round-*.safetensors"):
            if int(path.stem.rpartition("-")[2]) not in {*asked.keep, asked.version, asked.round}:
                path.unlink()

    def pseudonym(self, case: str) -> str:
        """The same number for the same case in every study; nobody else can find the case by it."""
        return f"case-{hmac.new(self._secret, case.encode(), 'sha256').hexdigest()[:10]}"


def _patients(mine: Study, name: str) -> list[Any]:
    """This hospital's cases; a folder of one site is this one, whatever it is called there."""
    sites = mine.data.case_refs(mine.seed)
    if name in sites:
        return list(sites[name])
    if len(sites) != 1:
        raise DataError(f"the data hold the sites {', '.join(sites)}; none is called {name!r}")
    (only,) = sites.values()
    return [replace(p, site=name) for p in only]


def _fits(mine: Source, wanted: Source) -> None:
    """Refuse data that are not what the study is about."""
    for what in ("task", "dims", "modality_names", "label_names"):
        here, there = getattr(mine, what), getattr(wanted, what)
        if here != there:
            raise Refusal(
                f"the study's {what.replace('_', ' ')}: {there}; those of this site: {here}; its [data] can name them"
            )


def _owner(agreed: Agreed, phase: int) -> str:
    """Whose memory it is: another phase, which may send it away, must not have it."""
    return f"{'/'.join(names_of(agreed.stages[phase][0]))} in phase {phase + 1}"


def _behind(fits: Sequence[Fit], size: int) -> int:
    """The fewest training cases behind anything that was trained: those that it saw. Mini-batches count together."""
    parts = [f.cases for f in fits if f.minibatch]
    seen = [f.cases for f in fits if not f.minibatch] + ([frozenset().union(*parts)] if parts else [])
    return min(map(len, seen), default=size)


def _fewest(stage: Study) -> int:
    """How many cases may be behind a model that leaves, where the steps of a training are counted."""
    algorithm, batch = stage.algorithm, -(-stage.train.batch // stage.train.patches)
    if not {"model", "update"} & set(algorithm.reply.values()):
        return sys.maxsize  # nothing that was trained leaves
    if isinstance(algorithm, L2gd):
        return batch  # a toss may end a run of local steps after the first
    steps, epochs = (getattr(algorithm, name, None) for name in ("steps", "epochs"))
    steps = stage.train.steps if steps is None and epochs is None else steps
    return sys.maxsize if steps is None else int(steps) * batch


def _together(fits: Sequence[Fit]) -> list[Fit]:
    """As they may be told: the mini-batches of a round as one, since behind each may be a single case."""
    parts = [f for f in fits if f.minibatch]
    steps = sum(f.steps for f in parts)
    if not steps:
        return list(fits)
    loss = math.fsum(f.loss * f.steps for f in parts) / steps
    lr_sum, reach = (math.fsum(getattr(f, name) for f in parts) for name in ("lr_sum", "reach"))
    whole = replace(parts[-1], loss=loss, steps=steps, lr_sum=lr_sum, reach=reach)
    return [*(f for f in fits if not f.minibatch), whole]


def _leaves(algorithm: Any) -> dict[str, Kind]:
    """What an algorithm may ask of a site, as far as its settings tell."""
    pooled = getattr(algorithm, "fit", "") == "pooled"
    return {name.rstrip("?") if pooled and kind == "cases" else name: kind for name, kind in algorithm.reply.items()}


def _machine() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"torch": torch.__version__, "device": gpu or "cpu"}


def _secret(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    if not path.exists():
        write_file(path, lambda p: p.write_bytes(secrets.token_bytes(32)))
        path.chmod(0o600)
    return path.read_bytes()


def _save(path: Path, arrays: Mapping[str, Any]) -> None:
    import safetensors.numpy

    safetensors.numpy.save_file(dict(arrays), path)


def main(folder: str) -> None:
    """Listen until the courier says stop, or none has come for a while."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    site = SiteConfig.load(Path(folder))
    try:
        worker = Worker(site, SitePolicy.load(site.policy))
        if site.data:
            source = worker.source()
            count = sum(map(len, source.case_refs(0).values()))
            worker.words = (
                f"{count} cases ({', '.join(source.modality_names)}) found in {site.data.get('path', 'drawings')}"
            )
    except PolysiteError as problem:
        print(f"polysite: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    with (site.state / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one whose courier was killed meanwhile goes when it says that it is ready
        _listen(worker)


def _listen(worker: Worker) -> None:
    door = ipc.listen(worker.site.socket)
    door.settimeout(IDLE)
    print(f"ready {worker.words}", flush=True)
    while True:
        try:
            courier, _ = door.accept()
        except TimeoutError:
            log.info("no courier for %d s: going", IDLE)
            break
        with courier:
            courier.settimeout(None)
            if _attend(worker, courier):
                break
    worker.site.socket.unlink(missing_ok=True)  # one that is left behind tells of a worker that was killed


def _attend(worker: Worker, courier: socket.socket) -> bool:
    """Answer until the courier goes away; true if it says that this is the end."""
    try:
        while (frame := ipc.receive(courier)) is not None:
            header, body = frame
            if header.get("courier") == "stop":
                return True
            if header.get("courier") == "ping":
                about = {"pid": os.getpid(), "config": worker.site.fingerprint, "cases": worker.words}
                ipc.send(courier, about)
                continue
            try:
                answer = worker.answer(header["asked"], body, header["incidents"])
            except RunError as problem:
                log.error("%s", problem)
                words = "its audit log cannot be written, so nothing leaves"
                answer = {"error": words, "mine": str(problem)}, b""
            ipc.send(courier, *answer)
    except OSError as problem:
        log.warning("the courier was lost: %s", problem)
    return False


if __name__ == "__main__":
    from polysite.deploy.site import worker  # by its own name, which is in what it writes down

    worker.main(sys.argv[1])
