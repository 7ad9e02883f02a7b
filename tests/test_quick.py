"""One study from end to end, the one of ``make quick``: phases, a personal model, compression, evaluation and page."""

import polysite as ps
from polysite.report import publish
from polysite.report.runs import methods, read
from studies import tiny

STUDY = tiny(
    {"east": 5, "west": ps.Hospital(cases=5, scanner=2)},
    seed=1,
    train={"batch": 2},
    run={"rounds": 2, "compress": "half"},
    then=({"algorithm": "ditto", "run": {"rounds": 2}},),
)


def test_a_small_study_trains_evaluates_itself_and_has_a_page(tmp_path):
    run = ps.train(STUDY, tmp_path / "run")
    assert [r.phase for r in run.folder.records()] == [0, 0, 1, 1] and set(run.dice()) == {"east", "west"}
    found = read(tmp_path / "run")
    assert found.evaluation is not None and set(found.values("hd95")) <= set(found.values("dice"))
    again = ps.train(STUDY, tmp_path / "again")
    assert again.result == run.result
    page = publish.page(tmp_path / "run" / "index.html", methods([found]))
    assert "east" in page.read_text()
