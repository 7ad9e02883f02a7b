"""Mirrored predictions: whether they pay for models that are trained already.

Averaging the predictions of a scan and of its mirror images changes no training, so it is not part of the search for a
recipe, where it would cost eight times the predictions: the finished models of the inner folds are scored once more.
"""

from dataclasses import replace

from polysite import config, study
from polysite.advice.decide import Gain, differences, gain_of
from polysite.advice.tournament import Key, Played, played
from polysite.benchmark.jobs import Job
from polysite.config import Study
from polysite.engines.run_folder import RunFolder


def mirrored(chosen: Study) -> Study:
    """Return a study with mirrored predictions."""
    return replace(chosen, train=replace(chosen.train, mirror=True))


def try_mirrored(final: Played) -> tuple[Played, Gain | None]:
    """Return the advised study, with mirrored predictions if their mean score is higher, and their gain.

    Both ways are scored with the same models. The gain is None where they cannot be tried: in a classification, or if
    the study has them already.
    """
    if final.study.data.task != "segmentation" or final.study.train.mirror:
        return final, None
    plain = played(final.study, final.jobs)  # one training; ``final`` may have the mean scores of two
    scores = {key: score for job in final.jobs for key, score in _scores(job).items()}
    gains = differences(replace(plain, scores=scores), plain)
    gain = gain_of(gains)
    if gain.mean <= 0:
        return final, gain
    better = {key: score + gains[key] for key, score in final.scores.items()}
    return replace(final, study=mirrored(final.study), scores=better), gain


def _scores(job: Job) -> dict[Key, float]:
    """Return the score of every case that a finished run left out, by mirrored predictions."""
    folder = RunFolder.open(job.run)
    chosen = mirrored(config.parse(folder.config, where=str(job.run / "config.toml")))
    dealt = study.dealt_as_trained(folder, chosen)
    sites = study.build_sites(chosen, dealt)
    trained = sorted(site for site, splits in dealt.items() if splits["train"])
    known, models = study.models_of(folder, chosen, trained, sites)
    found = models.phase.transport.score(models.round, models.payloads(known), "validation")
    return {(site, case): score.mean for site, cases in found.items() for case, score in cases.items()}
