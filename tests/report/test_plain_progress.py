"""Progress in a file: plain lines, no bars."""

import io

from rich.console import Console

from polysite.report import live, plain_progress, progress
from polysite.report.plain_progress import PlainProgress


def lines(every):
    text = io.StringIO()
    return PlainProgress(Console(file=text, width=40), every), text


def test_a_line_tells_what_is_done_and_what_is_left(monkeypatch):
    times = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(plain_progress, "monotonic", lambda: next(times))
    bars, text = lines(every=0.0)
    task = bars.add_task("fedavg      ", total=4, note="")
    bars.update(task, completed=1, note="round 1 · Dice 0.512, best 0.512")
    bars.stop_task(task)
    first, last = text.getvalue().splitlines()
    assert first == "fedavg: round 1 · Dice 0.512, best 0.512 · 1 of 4 · about 30.0 s left"
    assert last.startswith("fedavg: round 1")


def test_between_two_lines_nothing_is_printed_and_the_end_always_is():
    bars, text = lines(every=3600.0)
    task = bars.add_task("cases", total=100)
    for k in range(100):
        bars.update(task, advance=1, note=f"n{k}")
    bars.stop()
    bars.stop()
    assert text.getvalue().splitlines()[0].startswith("cases: n0 · 1 of 100")
    assert text.getvalue().splitlines()[1:] == ["cases: n99 · 100 of 100"]


def test_runs_and_searches_print_plain_lines_where_nobody_watches(capsys):
    with progress.progress() as bar:
        bar.case(2, 2, "n01")
        bar.begin("fedavg", 1, 0, 0.0)
        bar.site(0, "north", 1, 1)
        bar.end()
    with live.board("runs", 3, quiet=False) as step:
        step("fedavg of fold 1", running=["fedavg"])
    shown = capsys.readouterr().err
    assert "fedavg: done" in shown and "runs: fedavg of fold 1 · 1 of 3" in shown and "━" not in shown
