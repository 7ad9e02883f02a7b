"""The job folder, by the validator of FLARE itself."""

import json
import shutil

import pytest
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from typer.testing import CliRunner

from consortium import NAMES, config_of, wanted
from polysite import config
from polysite.cli import app
from polysite.deploy.flare.job import export
from polysite.errors import ConfigError, RunError


def validated(job, tmp_path):
    """What FLARE makes of a job: its description, or a refusal."""
    archive = shutil.make_archive(str(tmp_path / "zipped"), "zip", job.parent, job.name)
    accepted, problem, meta = JobMetaValidator().validate(job.name, archive)
    assert accepted, problem
    return meta


@pytest.mark.parametrize("sites", [(), NAMES])
def test_flare_accepts_the_job_and_sees_no_code_in_it(sites, tmp_path):
    job = export(wanted("fine_tune"), tmp_path / "job", sites=sites, quorum=3)
    meta = validated(job, tmp_path)
    (flow,) = json.loads((job / "app" / "config" / "config_fed_server.json").read_text())["workflows"]
    settings = {"again", "assess", "deadline", "grace", "lost", "poll", "quorum", "wait"}
    assert flow["args"].keys() == {"id", "sites", "study"} | settings
    assert meta["min_clients"] == 3 and "byoc" not in meta
    assert meta["deploy_map"] == {"app": ["server", *sites] if sites else ["@ALL"]}
    assert {p.suffix for p in job.rglob("*") if p.is_file()} == {".json", ".toml"}
    assert config.parse((job / "app" / "config" / "study.toml").read_text()).run.guard == wanted("fine_tune").run.guard


def test_what_cannot_be_a_job_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="quorum of 4 sites"):
        export(wanted("fedavg"), tmp_path / "job", sites=NAMES, quorum=4)
    with pytest.raises(ConfigError, match="scans would have to leave"):
        export(config.vary(wanted("fedavg"), {"run": {"pooled": True}}), tmp_path / "job")
    (tmp_path / "job").mkdir()
    with pytest.raises(RunError, match="exists already"):
        export(wanted("fedavg"), tmp_path / "job")


def test_the_command_writes_a_job_and_says_how_it_is_submitted(tmp_path):
    (tmp_path / "study.toml").write_text(config_of("fedavg"))
    command = ["deploy", "export", str(tmp_path / "study.toml"), "--out", str(tmp_path / "job")]
    done = CliRunner().invoke(app, [*command, *(f"--site={name}" for name in NAMES), "--min-sites", "3"])
    assert done.exit_code == 0, done.output
    assert f"nvflare job submit -j {tmp_path / 'job'}" in done.output and "-c a,b,c -t 3" in done.output
    validated(tmp_path / "job", tmp_path)
