"""The table of the evidence bank: several writers, damaged lines, file modes, the off switch."""

import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from evidence_lines import FAR, RUN
from polysite.evidence import table
from polysite.evidence.lines import from_json, to_json

WRITER = """
import sys
import types
from dataclasses import replace
import polysite
package = sys.modules["polysite.evidence"] = types.ModuleType("polysite.evidence")
package.__path__ = [f"{polysite.__path__[0]}/evidence"]  # its table alone, without torch
from evidence_lines import RUN
from polysite.evidence import table
key = table.secret()
for k in range(40):
    table.append(replace(RUN, method=f"{sys.argv[1]}-{k}", note=key.hex() + "x" * 5000))
"""


def test_lines_survive_their_json():
    assert from_json(to_json(RUN)) == RUN
    assert from_json(to_json(FAR)) == FAR
    assert from_json(to_json(RUN).replace('"task"', '"later": 1, "task"')) == RUN  # a later version has more keys


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", "{}", '{"kind": "run"}', '{"kind": "none"}', '{"kind": []}', "\x00" * 20, "[" * 5000]
    + [to_json(RUN)[:cut] for cut in (5, 100, -1)]
    + [to_json(RUN).replace(a, b) for a, b in (("0.7,", '"0.7",'), ("[9, 8, 4]", "[]"), ("[9, 8, 4]", '["CS", 1, 2]'))],
)
def test_damage_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"evidence bank|must be|line 1"):
        from_json(text)


def test_several_processes_write_at_once():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [subprocess.Popen([sys.executable, "-c", WRITER, str(k)], env=env) for k in range(3)]
    assert [p.wait() for p in started] == [0, 0, 0]
    lines = table.read()
    assert sorted(line.method for line in lines) == sorted(f"{p}-{k}" for p in range(3) for k in range(40))
    assert len({line.note for line in lines}) == 1  # one key for all


def test_only_the_owner_can_read_it():
    table.append(RUN)
    table.secret()
    assert {f.name: f.stat().st_mode & 0o777 for f in table.place().iterdir()} == dict.fromkeys(
        (table.FILE, table.KEY, ".evidence.lock"), 0o600
    )


def test_damaged_lines_are_skipped_with_a_warning(caplog):
    table.append(RUN)
    with (table.place() / table.FILE).open("ab") as file:
        file.write(b'\xff\xfe not a line\n\n{"kind": "run", "data": "cut sh')  # a process died while it wrote
    table.append(FAR)
    with caplog.at_level(logging.WARNING, "polysite"):
        assert table.read() == [RUN, FAR]
    assert [r.message.split(": ")[-1] for r in caplog.records] == ["lines 2, 4 cannot be read and are skipped"]


def test_off_reads_nothing(monkeypatch):
    table.append(RUN)
    monkeypatch.setenv("POLYSITE_EVIDENCE", "off")
    assert table.is_off()
    assert table.read() == []


def test_the_default_lies_below_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("POLYSITE_EVIDENCE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert table.place() == tmp_path / ".local" / "share" / "polysite"


def test_a_broken_key_is_replaced():
    first = table.secret()
    assert table.secret() == first
    (table.place() / table.KEY).write_bytes(b"short")
    assert len(table.secret()) == table.KEY_BYTES
    assert table.secret() != first


def test_a_line_must_be_valid_json():
    with pytest.raises(ValueError, match="Out of range"):
        to_json(replace(RUN, spread=float("nan")))
