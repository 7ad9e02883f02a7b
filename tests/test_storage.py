"""Folders and files that only their owner can open, whatever the umask is."""

import os
import stat

import pytest

from polysite.engines.record import Result, RoundRecord
from polysite.engines.run_folder import RunFolder
from polysite.engines.site_memory import Memory
from polysite.payload import Payload
from polysite.storage import draft_folder, private_folder, set_aside, write_file, write_private


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder):
    return {p: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.rglob("*"))}


def test_a_run_folder_is_private(tmp_path, umask):
    folder = RunFolder.create(tmp_path / "runs" / "a", "seed = 1", 1, "", more={"deployment.json": "{}"})
    folder.append(RoundRecord(0, 0, {}))
    folder.save_model("best", {"w": __import__("numpy").ones(3)})
    memory = Memory("north", "fedavg", 0, Payload(n=1.0))
    folder.keep(folder.round(0), 3, [memory])
    folder.finish(Result("segmentation", ("WT",), ("t1",), 1, 0, 0, {}, {}))
    found = modes(tmp_path / "runs" / "a")
    assert len(found) > 12
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}


def test_what_is_published_follows_the_umask(tmp_path, umask):
    with draft_folder(tmp_path / "page", "page", private=False) as draft:
        (draft / "index.html").write_text("x")
    assert modes(tmp_path / "page")[tmp_path / "page"] == 0o777 & ~umask
    write_file(tmp_path / "page" / "more.html", lambda p: p.write_text("x"))
    shared = umask != 0o077
    assert modes(tmp_path / "page")[tmp_path / "page" / "more.html"] == (0o666 & ~umask if shared else 0o600)


def test_private_files_and_folders(tmp_path, umask):
    write_private(tmp_path / "secret", b"x")
    private_folder(tmp_path / "a" / "b")
    assert modes(tmp_path)[tmp_path / "secret"] == 0o600 and modes(tmp_path)[tmp_path / "a" / "b"] == 0o700
    set_aside(tmp_path / "secret")
    set_aside(tmp_path / "secret")  # it is gone already
    assert (tmp_path / "secret.damaged").read_bytes() == b"x"
