"""Fine-tuning: every site trains on alone and keeps the model with the best score on its validation cases.

Paper: Manthe et al., Federated brain tumor segmentation: an extensive benchmark, 2024, section 3.3; Ditto after
training: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, section 3

    v_k <- steps on F_k(v) + lam/2 |v - w|^2 from v_k,    v_k = w at first,    w the initial model of the site

It is a phase after another algorithm; a round is an epoch. lam = 0 is plain fine-tuning, lam > 0 is Ditto post hoc. If
lists are given, every pair of a learning rate and a lam is trained. The site keeps the pair and the round with the
highest mean Dice (accuracy) on its validation cases. w is a candidate too, so the validation score of a site never
falls. A site without validation cases keeps w, as does a site that does not train.

No model is sent in either direction; a site reports only its choice. The benchmark takes 30 epochs; it fine-tunes with
lr in 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, and Ditto with lr in 0.01, 0.04, 0.1, 0.4 and lam in 0.001, 0.01, 0.1, 1 (Table
A.4). Its equation 24 sums the loss over cases; F_k is their mean here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, ClassVar

from polysite.algorithms.base import INF, TINY, Facts, Kind, within
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Budget, Cases, Objective, Site, Tilt
from polysite.tree import Tree


@dataclass(frozen=True)
class FineTune:
    """Local fine-tuning from the model of the phase before; every site keeps its best model.

    Args:
        lr: Learning rates to choose from, each more than 0; an empty list: the site's own (train.lr).
        lam: Weights of the proximal term to choose from (lambda of Ditto), each at least 0; 0 is plain fine-tuning.
        epochs: Local epochs per round, at least 1; None: the site's own (train.epochs).
        steps: Local iterations per round, at least 1, instead of epochs.
    """

    lr: tuple[float, ...] = ()
    lam: tuple[float, ...] = (0.0,)
    epochs: int | None = None
    steps: int | None = None

    reply: ClassVar[Mapping[str, Kind]] = {"chosen_round": "number", "chosen_lr": "number", "chosen_lam": "number"}
    facts: ClassVar[Facts] = Facts(needs="sum", needs_model=True)

    def __post_init__(self) -> None:
        within(self, epochs=(1, INF), steps=(1, INF))
        if not self.lam:
            raise ConfigError("lam is an empty list; 0 is plain fine-tuning")
        for name, values, least in (("lr", self.lr, TINY), ("lam", self.lam, 0.0)):
            odd = next((v for v in values if not least <= v < INF), None)
            if odd is not None:
                raise ConfigError(f"{name} holds {odd}; every one must be {'more than' if least else 'at least'} 0")

    @property
    def trials(self) -> int:
        """Pairs of a learning rate and a lam that every site trains.

        >>> FineTune(lr=(0.1, 0.01, 0.001), lam=(0.0, 0.5)).trials, FineTune(lr=(), lam=(0.0, 0.5)).trials
        (6, 2)
        """
        return max(1, len(self.lr)) * len(self.lam)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> None:
        return None

    def send(self, state: None, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: Payload() for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        validation = site.cases("validation")

        def score_of(params: Tree) -> float:
            return fmean(s.mean for s in site.score(params, validation).values()) if validation else 0.0

        kept: dict[str, Any] = {
            **(memory or {"best": site.start, "score": score_of(site.start), "round": 0.0, **NOTHING})
        }
        kept["round"] += 1.0
        for k, (lr, lam) in enumerate(product(self.lr or (None,), self.lam)):
            tilt = Tilt(anchor=site.start, weight=lam) if lam else None
            fit = site.fit(kept.get(f"trial_{k}", site.start), Objective(tilt), Budget(lr, self.epochs, self.steps))
            kept[f"trial_{k}"], score = fit.params, score_of(fit.params)
            if score > kept["score"]:
                kept.update(best=fit.params, score=score)
                kept.update(chosen_round=kept["round"], chosen_lr=lr or 0.0, chosen_lam=lam)
        return Payload(**{name: kept[name] for name in self.reply}), Payload(**kept)

    def merge(self, state: None, replies: Mapping[SiteId, Payload]) -> None:
        return None

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield memory.get("best", site.start), cases


NOTHING = dict.fromkeys(FineTune.reply, 0.0)  # the choice before the first round
