"""The best round of every site: ``run.best = "own"``.

Sites that share a model (a cluster) are judged together, by the mean score of the validation cases of all of them; any
other site by its own. A site whose cluster is new starts again without a best score. A cluster without validation
cases is judged by those of all sites, and so is a hospital that joins later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from polysite.engines.record import mean_score
from polysite.payload import SiteId
from polysite.site import Scores

STRANGER = "*"  # any site that did not take part; no site has this name
Judge = str | None  # a cluster; None: all sites together


@dataclass(frozen=True, slots=True)
class Own:
    """Best round of a site so far."""

    round: int
    score: float
    judge: Judge


def improved(
    own: Mapping[SiteId, Own],
    clusters: Mapping[SiteId, str],
    scores: Mapping[SiteId, Scores],
    round: int,
    over: Literal["case", "site"] = "case",
) -> dict[SiteId, Own]:
    """Return the sites for which this round is better than any before.

    Args:
        own: Best round of every site so far.
        clusters: Cluster of every site.
        scores: Scores of the validation cases; not empty.
        round: The round.
        over: What counts once in a mean over several sites: a case, or with a guard a site.
    """
    everyone, better = mean_score(scores, over), {}
    judges: dict[SiteId, Judge] = {**clusters, STRANGER: None}
    for site, cluster in judges.items():
        heard = {i: s for i, s in scores.items() if s and cluster is not None and clusters.get(i) == cluster}
        known = own.get(site)
        if not heard and known and cluster is not None and known.judge == cluster:
            continue  # its judges are absent this time
        judge, score = (cluster, mean_score(heard, over)) if heard else (None, everyone)
        if known is None or known.judge != judge or score > known.score:
            better[site] = Own(round, score, judge)
    return better
