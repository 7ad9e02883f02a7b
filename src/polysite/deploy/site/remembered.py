"""A host whose memory lies on disk: one file a version, written before the response leaves.

So a worker that is killed continues as if it had not been. A damaged memory is replaced by an earlier one, and the
model that a phase began from by its copy.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from polysite.algorithms import names_of
from polysite.deploy.site.agreement import Agreed
from polysite.deploy.site.hospital import Hospital
from polysite.deploy.site.policy import Refusal
from polysite.engines import checkpoint, messages, site_memory
from polysite.engines.run_folder import file_name
from polysite.engines.site_memory import Memory
from polysite.engines.site_turn import Turn
from polysite.errors import RunError
from polysite.payload import Payload, pack, plain
from polysite.storage import private_folder, set_aside, write_file
from polysite.tree import Tree

log = logging.getLogger("polysite")


class Remembered:
    """Gives the host its memory, and keeps what it returns."""

    def __init__(self, hospital: Hospital, agreed: Agreed):
        self.hospital, self.agreed, self.inner = hospital, agreed, agreed.host

    def answer(self, request: messages.HostRequest) -> messages.Response:
        """Do what is asked; raise ``Refusal`` where the host does not."""
        phase = request.before if isinstance(request, messages.Begin) else request.phase
        self._catch_up(phase)
        response = self.inner.answer(replace(request, memory=self._memory(request, phase)))
        match request, response:
            case _, messages.Refused(reason):
                raise Refusal(reason)
            case messages.Train(), messages.Trained(turn=Turn() as turn):
                self._keep_memory(request, turn.memory)
            case messages.Begin(), messages.Begun():
                self._keep_start(request, response.start)
            case messages.Serve(), messages.Models():
                self._keep_models(request, cast(Sequence[Tree], response.models))
        return response

    # the beginning of a phase

    def _catch_up(self, phase: int) -> None:
        """After a restart, begin a phase again from the model that it began from."""
        if not self.inner.has_begun(phase):
            start = self._started(phase)
            self.inner.enter(phase, start.version, start.content["model"])

    def _start_files(self, phase: int) -> tuple[Path, Path]:
        """Return the file with the model that a phase began from, which is not sent again, and a copy of it."""
        folder = self.agreed.folder
        return folder / f"phase-{phase}.safetensors", folder / f"phase-{phase}.copy.safetensors"

    def _started(self, phase: int) -> Memory:
        """Return what a phase began from; if the file is damaged, from the copy."""
        first, copy = self._start_files(phase)
        lift = self.inner.phases[phase].site.lift
        try:
            return site_memory.load_any(first, lift)
        except checkpoint.Damaged as problem:
            found = site_memory.load_any(copy, lift)
            log.error("%s", problem)
            set_aside(first)
            self.hospital.note(f"the model that phase {phase + 1} began from was damaged: it goes on from the copy")
            return found

    def _keep_start(self, request: messages.Begin, model: Tree) -> None:
        start = Memory(self.inner.name, "start", request.begins, Payload(model=model))
        self.hospital.make_room(self.agreed.folder, 2 * start.content.nbytes)
        for file in self._start_files(request.phase):
            site_memory.save(file, start)

    # the memory

    def _memory_file(self, version: int) -> Path:
        return self.agreed.folder / "memory" / f"round-{version:06d}.safetensors"

    def _owner(self, phase: int) -> str:
        """Return the owner of a memory. Another phase, which might send the memory away, must not read it."""
        return f"{'/'.join(names_of(self.inner.phases[phase].algorithm))} in phase {phase + 1}"

    def _memory(self, request: messages.Asked, phase: int) -> Payload:
        if request.version < 0:
            return Payload()
        try:
            return self._load(request.version, phase)
        except checkpoint.Damaged as problem:
            log.error("%s", problem)
            return self._recovered(request.version, phase)

    def _load(self, version: int, phase: int) -> Payload:
        lift = self.inner.phases[phase].site.lift
        return site_memory.load(self._memory_file(version), self.inner.name, self._owner(phase), version, lift)

    def _recovered(self, damaged: int, phase: int) -> Payload:
        """Return the newest sound memory before a damaged one, or an empty one, as of a site that has just joined.

        The damaged file is renamed. The version of a memory is the last round that counted, so an earlier one is that
        of a site that missed the rounds since then.
        """
        set_aside(self._memory_file(damaged))
        what = f"its memory of round {damaged + 1} was damaged"
        versions = map(_version, self.agreed.folder.glob("memory/round-*.safetensors"))
        for version in sorted((version for version in versions if version < damaged), reverse=True):
            with suppress(RunError):  # damaged, too, or of another phase
                found = self._load(version, phase)
                self.hospital.note(f"{what}: it goes on from that of round {version + 1}")
                return found
        self.hospital.note(f"{what}: it goes on as if it had just joined")
        return Payload()

    def _keep_memory(self, request: messages.Train, content: Payload) -> None:
        """Write the new memory; delete versions that no checkpoint of the server needs."""
        memory = Memory(self.inner.name, self._owner(request.phase), request.round, content)
        self.hospital.make_room(self.agreed.folder, content.nbytes)
        site_memory.save(self._memory_file(request.round), memory)
        for path in (self.agreed.folder / "memory").glob("round-*.safetensors"):
            if _version(path) not in {*request.keep, request.version, request.round}:
                path.unlink()

    # the models that this hospital is served

    def _keep_models(self, request: messages.Serve, models: Sequence[Tree]) -> None:
        folder = self.agreed.folder / "models"
        for k, model in enumerate(models if request.name else ()):
            arrays = {name: plain(value) for name, value in model.items()}
            group = f".group-{k}" if len(models) > 1 else ""
            self.hospital.make_room(self.agreed.folder, sum(int(a.nbytes) for a in arrays.values()))
            private_folder(folder)
            write_file(
                folder / f"{file_name(request.name)}{group}.safetensors",
                lambda draft, a=arrays: draft.write_bytes(pack(a)),  # type: ignore[misc]
            )


def _version(path: Path) -> int:
    """Return the version in the name of a memory's file."""
    return int(path.stem.rpartition("-")[2])
