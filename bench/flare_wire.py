"""FLARE's part of ``wire.py``: the same rounds without training, in the server's process of a FLARE job.

``rounds`` starts a provisioned federation, with stub workers in place of the hospitals'; FLARE builds ``Rounds`` there
instead of polysite's own controller, because no study is trained and nothing is written.
"""

import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import wire
from safetensors.numpy import load_file, save_file

from polysite import config
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.flare.controller import StudyController
from polysite.deploy.flare.job import CONTROLLER, export
from polysite.deploy.flare.wire import FlareWire
from polysite.engines.rounds import run_rounds
from polysite.engines.watch import Watch
from polysite.payload import plain


class Rounds(StudyController):
    """Runs the rounds of the benchmark; the file ``stamps`` gets a line after each."""

    def control_flow(self, abort_signal, fl_ctx):
        workspace = fl_ctx.get_engine().get_workspace()
        folder = Path(workspace.get_root_dir()).parent
        text = (Path(workspace.get_app_config_dir(fl_ctx.get_job_id())) / self.study).read_text()
        chosen, params = config.parse(text), coordinator._lift(load_file(folder / "start.safetensors"))
        start = {k: x.clone() for k, x in list(params.items())[:1]}
        post = FlareWire(self, fl_ctx, abort_signal)
        sites = coordinator._roster(post, "wire", chosen, "", self.sites, self.limits, Watch())
        sites.gather(60)
        (phase,) = coordinator._phases(chosen, sites)
        for r in run_rounds(phase.algorithm, phase.transport, params, chosen.run, seed=0):
            with (folder / "stamps").open("a") as file:
                file.write(f"{time.time()}\n")
            wire.check(r, start, sorted(self.sites))
            del r


def rounds(chosen, params, names: list[str], folder: Path, count: int) -> list[dict]:
    """Seconds, bytes and memory of so many rounds, after a first one that is not counted."""
    from flare_federation import Federation

    with Federation(folder, names) as federation:
        save_file({k: plain(x) for k, x in params.items()}, folder / "start.safetensors")
        job = export(chosen, folder / "job", sites=names, quorum=len(names), assess=False)
        _replace(job / "app" / "config" / "config_fed_server.json", CONTROLLER)
        _replace(folder / "server" / "local" / "resources.json", CONTROLLER)
        for name in names:
            wire.stand_in(folder / name / "local" / "polysite" / "site.toml", folder / name / "polysite", chosen)
        federation.submit(job)
        return wire.stamped(folder, count, "server.txt")


def _replace(file: Path, name: str) -> None:
    text = file.read_text()
    assert name in text, (file, name)
    file.write_text(json.dumps(json.loads(text.replace(name, f"{Path(__file__).stem}.Rounds"))))
