"""Mirrored predictions: whether they pay for models that are trained already.

Averaging the predictions of a scan and of its mirror images changes no training, so it is not part of the search for a
recipe, where it would cost eight times the predictions: the finished models of the inner folds are scored once more.
"""

import json
from dataclasses import replace
from pathlib import Path

from polysite import study
from polysite.advice.decide import Gain, differences, gain_of
from polysite.advice.tournament import Key, Played, played
from polysite.benchmark.jobs import Job
from polysite.config import Study
from polysite.engines.run_folder import RunFolder
from polysite.foreign import parse_json
from polysite.storage import write_file


def mirrored(chosen: Study) -> Study:
    """Return a study with mirrored predictions."""
    return replace(chosen, train=replace(chosen.train, mirror=True))


def try_mirrored(final: Played, file: Path) -> tuple[Played, Gain | None]:
    """Return the advised study, with mirrored predictions if their mean score is higher, and their gain.

    Both ways are scored with the same models. The gain is None where they cannot be tried: in a classification, or if
    the study has them already. The file keeps the scores, so that an advice that is continued chooses the same.
    """
    if final.study.data.task != "segmentation" or final.study.train.mirror:
        return final, None
    once = played(final.study, final.jobs)  # one training; ``final`` may have the mean scores of two
    if not file.exists():
        scores = [[*key, score] for job in final.jobs for key, score in _scores(job).items()]
        write_file(file, lambda path: path.write_text(json.dumps(scores), encoding="utf-8"))
    kept = {(site, case): score for site, case, score in parse_json(file.read_text(encoding="utf-8"))}
    gains = differences(replace(once, scores=kept), once)
    gain = gain_of(gains)
    if gain.mean <= 0:
        return final, gain
    better = {key: score + gains[key] for key, score in final.scores.items()}
    return replace(final, study=mirrored(final.study), scores=better), gain


def _scores(job: Job) -> dict[Key, float]:
    """Return the score of every case that a finished run left out, by mirrored predictions."""
    folder = RunFolder.open(job.run)
    chosen = mirrored(study.study_of(folder))
    dealt = study.dealt_as_trained(folder, chosen)
    sites = study.build_sites(chosen, dealt)
    trained = sorted(site for site, splits in dealt.items() if splits["train"])
    known, models = study.models_of(folder, chosen, trained, sites)
    found = models.phase.transport.score(models.round, models.payloads(known), "validation")
    return {(site, case): score.mean for site, cases in found.items() for case, score in cases.items()}
