"""FedRep: in every round a site trains its private head first, then the shared body.

Paper: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021, Algorithm 1

    v_k <- fit_k(u, v_k) of the head alone,    u_k = fit_k(u, v_k) of the body alone,    u <- mean_k u_k

The body u is shared, the head v_k stays at site k. The part that is not trained stays fixed, running statistics
included. All sites have the same weight, as in the paper; uniform = false weighs them by cases. The paper trains the
head for 10 epochs per round and the body for 1. As there, a site is served u and the v_k of its last round. In the
paper a new site trains a head for u; here a site that never trained is served u and the initial v.
"""

from dataclasses import dataclass

from polysite.algorithms.base import INF, TINY, one_of, within
from polysite.algorithms.partial_models import PrivatePart, parted, whole
from polysite.payload import Payload
from polysite.site import Budget, Site

HEAD_EPOCHS = 10  # as in the paper


@dataclass(frozen=True)
class FedRep(PrivatePart):
    """A shared body, and a head per site that is trained before the body in every round.

    Args:
        private: Patterns of the parameters that stay at a site: the head.
        lr: Learning rate of the body, more than 0; None: the site's own (train.lr).
        epochs: Epochs of the body per round, at least 1; None: the site's own (train.epochs).
        steps: Iterations of the body per round, at least 1, instead of epochs.
        head_lr: Learning rate of the head, more than 0; None: that of the body.
        head_epochs: Epochs of the head per round, at least 1; None: 10, as in the paper.
        head_steps: Iterations of the head per round, at least 1, instead of epochs.
        uniform: Whether all sites have the same weight, as in the paper, instead of weights by number of cases.
    """

    private: tuple[str, ...] = ("head.*",)
    lr: float | None = None
    epochs: int | None = None
    steps: int | None = None
    head_lr: float | None = None
    head_epochs: int | None = None
    head_steps: int | None = None
    uniform: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, lr=(TINY, INF), epochs=(1, INF), steps=(1, INF))
        within(self, head_lr=(TINY, INF), head_epochs=(1, INF), head_steps=(1, INF))
        one_of(self, "fedrep")
        one_of(self, "fedrep", "head_epochs", "head_steps")

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        model = whole(self.private, got, memory, site)
        body, head = parted(self.private, model)
        tuned = site.fit(model, budget=self._head(), only=tuple(head))
        fit = site.fit(tuned.params, budget=Budget(self.lr, self.epochs, self.steps), only=tuple(body))
        body, head = parted(self.private, fit.params)
        return Payload(model=body, weight=1 if self.uniform else site.size), Payload(private=head)

    def _head(self) -> Budget:
        """Return the budget of the head."""
        paper = HEAD_EPOCHS if self.head_epochs is None and self.head_steps is None else self.head_epochs
        return Budget(self.lr if self.head_lr is None else self.head_lr, paper, self.head_steps)
