"""The demonstration, small: it trains, it shows, its page stands alone."""

import re

from polysite import demo
from polysite.engines.watch import Watch
from studies import text


def test_the_page_stands_alone_and_shows_everything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "STUDY", text({"capital": 5, "island": 4}, run="rounds = 2", patch=24))
    root = demo.run(tmp_path / "demo", 0, Watch()).parent
    page = (root / "index.html").read_text()
    assert page.count("<svg") >= 6 and page.count("<table") >= 8
    assert not re.findall(r'<[^>]+ (?:src|href|xlink:href)="(?!#|data:)', page)  # nothing is fetched
    demo.show(root)
    printed = capsys.readouterr().out
    assert all(name in page for name in (*demo.METHODS, "capital", "island", "WT", "TC", "ET"))
    assert all(name in printed for name in (*demo.METHODS, "capital", "island"))
