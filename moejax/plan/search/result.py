"""The result of a search."""

from dataclasses import dataclass

from moejax.plan.price.candidate import PricedPlan


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
      ranked: plans that fit: the chosen one, which is the plainest of the equally fast, then the
        others, fastest first.
      baseline: the usual default without planning; None if it breaks a rule.
      simple: the faster of FSDP over all devices, and experts inside a node with FSDP across nodes,
        each made lighter until it fits; None if neither does.
      meshes: number of valid meshes.
      traced: number of traced programs.
      too_large: number of traced plans that need too much memory.
      memory_budget: bytes of a device that a plan may use.
      seconds: time of the search.
      cut: one line about the time cap if it ended the search; None: another search finds the same.
    """

    ranked: list[PricedPlan]
    baseline: PricedPlan | None
    meshes: int
    traced: int
    too_large: int
    memory_budget: float
    seconds: float
    cut: str | None = None
    simple: PricedPlan | None = None
