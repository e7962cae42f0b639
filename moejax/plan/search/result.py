"""The result of a search."""

from dataclasses import dataclass, field

from moejax.config.compression import NO_COMPRESSION, build_compression
from moejax.plan.price.candidate import PricedPlan


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
      ranked: plans that fit: the chosen one, which is the plainest of the equally fast, then the
        others, fastest first.
      meshes: number of valid meshes.
      traced: number of traced programs.
      too_large: number of traced plans that need too much memory.
      memory_budget: bytes of a device that a plan may use.
      seconds: time of the search.
      cut: one line about the time cap if it ended the search; None: another search finds the same.
      rules: plans of `space.RULES`, fastest first, each made lighter until it fits; those that
        cannot fit stand at the end.
    """

    ranked: list[PricedPlan]
    meshes: int
    traced: int
    too_large: int
    memory_budget: float
    seconds: float
    cut: str | None = None
    rules: dict[str, PricedPlan] = field(default_factory=dict)

    @property
    def best_rule(self) -> str | None:
        """Name of the fastest rule of thumb; None if none fits."""
        names = (name for name, plan in self.rules.items() if plan.peak.bytes <= self.memory_budget)
        return next(names, None)

    @property
    def plain(self) -> PricedPlan | None:
        """The fastest plan without codecs; None if all that fit have some."""
        plans = sorted(self.ranked, key=lambda plan: plan.seconds)
        return next((plan for plan in plans if not has_codecs(plan)), None)


def has_codecs(plan: PricedPlan) -> bool:
    """Whether a plan compresses something."""
    return build_compression(plan.cfg.compression) != NO_COMPRESSION
