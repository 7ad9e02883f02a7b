"""One study from end to end, the one of ``make quick``: phases, a personal model, compression, evaluation and page."""

import polysite as ps
from polysite import config
from polysite.report import publish
from polysite.report.runs import methods, read

STUDY = """
seed = 1
[data]
shape = [24, 24, 24]
[data.sites.east]
cases = 5
[data.sites.west]
cases = 5
scanner = 2
[model]
filters = [2, 4, 4]
[train]
patch = [16, 16, 16]
batch = 2
device = "cpu"
[run]
rounds = 2
compress = "half"
[[then]]
algorithm = "ditto"
run.rounds = 2
"""


def test_a_small_study_trains_evaluates_itself_and_has_a_page(tmp_path):
    run = ps.train(config.parse(STUDY), tmp_path / "run")
    assert [r.phase for r in run.folder.records()] == [0, 0, 1, 1] and set(run.dice()) == {"east", "west"}
    found = read(tmp_path / "run")
    assert found.evaluation is not None and set(found.values("hd95")) <= set(found.values("dice"))
    again = ps.train(config.parse(STUDY), tmp_path / "again")
    assert again.result == run.result
    page = publish.page(tmp_path / "run" / "index.html", methods([found]))
    assert "east" in page.read_text()
