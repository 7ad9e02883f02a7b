"""What a page says of a guarded run: means over hospitals, alarms with the site and the evidence."""

import json

from folders import load, write
from polysite.report.page import build

CASES = {s: {str(k): {"WT": 0.5} for k in range(2)} for s in ("north", "south")}
LIAR = {"island": {str(k): {"WT": 0.999} for k in range(200)}}


def test_a_hospital_that_claims_many_cases_does_not_make_the_mean(tmp_path):
    believed = build("run", load(write(tmp_path / "off", CASES | LIAR)))
    assert "mean Dice of 0.989 on 204 test cases" in believed
    text = build("run", load(write(tmp_path / "on", CASES | LIAR, run={"guard": {"use": "on"}})))
    assert "mean Dice of 0.666 over 3 hospitals, each of which counts once (204 test cases by their own" in text
    assert "0.989 ±" in believed and "0.989 ±" not in text and "island reports 200 of the 204 cases" in text


def test_an_alarm_names_the_site_and_the_evidence(tmp_path):
    run = write(tmp_path / "run", CASES, run={"guard": {"use": "on"}})
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    fine = {"lengths": {"model": 1.0}, "longest": {"model": 2.0}, "cosine": 0.6, "coherence": 0.6, "standing": 1.0}
    bad = {**fine, "cosine": -0.7, "standing": -0.8, "factor": 0.05, "persistence": 0.5, "usual_persistence": 0.1}
    worse = {**fine, "harm": 0.61, "judges": 4, "factor": 0.05}
    long = {**fine, "lengths": {"model": 20.0}, "clipped": {"model": 0.1}}
    for line, north in zip(lines, (bad, bad, long), strict=True):
        line["guard"] = {"north": north, "south": fine, "west": worse}
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = build("run", load(run))
    assert "Alarm: the changes of north lack the direction of the other hospitals" in text
    assert "by 0.05 of its weight at the least, in 2 of 3 rounds" in text and "lowest standing -0.80" in text
    assert "Alarm: changes of north were shortened in 1 of 3 rounds; the longest was 10 times" in text
    assert (
        "Alarm: changes of west make the model worse on the validation cases of the other hospitals, by up to 0.61"
        in text
    )
    assert "measured by up to 4 hospitals" in text and "the changes of west lack" not in text
    assert "of south" not in text.split("<section")[0] and "What the guard saw and did" in text
    (run / "result.json").unlink()
    assert "Alarm: the changes of north" in build("run", load(run))  # while it runs, too
