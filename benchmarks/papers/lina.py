"""Lina, Figure 7: the backward pass of one MoE layer while an earlier gradient is all-reduced.

Two all-to-alls around the experts' FFN, on the link that the all-reduce wants too. The gradient is
ready when the backward pass of the layer starts, that is with the combine's.

Taken as printed: the FFN; the time of an all-to-all, from the all-to-alls of a step (Table 1: 12
layers, two forward and two backward each, the mean of all); the rest of the layer's compute, from
the share that all-to-alls have of a layer's forward pass, backward twice as long as forward.
Assumed: that rest is half combine, before the all-to-alls, and half gate, after them.
Fitted: the all-reduce, to the 29.0 ms of streams that share the link fairly.

Source: Li et al., Accelerating Distributed MoE Training and Inference with Lina (ATC 2023),
Figure 7 and Table 1 (419M parameters, 16 experts). Times in ms.
"""

from benchmarks.papers.comparison import Comparison
from moejax.plan.price.simulate import Policy, Task, simulate

FAIR_MS, PRIORITY_MS, DEFERRED_MS, GAIN_MS = 29.0, 30.9, 24.6, 6.6
FFN_MS, CUT_MS = 1.6, 0.764
STEP_EXCHANGES_MS, LAYERS = 333, 12
MEDIAN_SLOWDOWN = 1.83  # of a backward all-to-all that shares the link
FORWARD_SHARE = 0.749  # of all-to-alls in a layer's forward pass
PIECES = 4  # of an all-to-all: what 30 MB make of it is not printed; 2 to 8 give the same
GRADIENT_PIECES = 16
BEFORE = 0.5  # of the other compute: the combine's share, before the all-to-alls

EXCHANGE_MS = STEP_EXCHANGES_MS / LAYERS / 4
UNDISTURBED_MS = STEP_EXCHANGES_MS / LAYERS / (2 + 2 * MEDIAN_SLOWDOWN)


def rest_ms(exchange: float) -> float:
    """Compute of the layer's backward pass beside the FFN: the combine's and the gate's."""
    forward = 2 * exchange * (1 - FORWARD_SHARE) / FORWARD_SHARE
    return 2 * forward - FFN_MS


def whole(
    allreduce: float,
    policy: Policy,
    *,
    exchange: float = EXCHANGE_MS,
    before: float = BEFORE,
    deferred: bool = False,
) -> tuple[float, float]:
    """When the layer's gradients are done, and when the all-reduce is, with whole tensors."""
    rest = rest_ms(exchange)
    tasks = [
        Task("combine", "compute", rest * before),
        Task("all-to-all 1", "net", exchange, (0,), priority=1),
        Task("ffn", "compute", FFN_MS, (1,)),
        Task("all-to-all 2", "net", exchange, (2,), priority=1),
        Task("gate", "compute", rest * (1 - before), (3,)),
        Task("all-reduce", "net", allreduce, (3,) if deferred else ()),
    ]
    timeline = simulate(tasks, {"net": policy})
    return timeline.end_s[4], timeline.end_s[5]


def in_pieces(allreduce: float, *, waits: bool, pieces: int = PIECES) -> tuple[float, float]:
    """The same with everything cut in pieces, and all-to-alls in a pipeline with the FFN.

    Args:
      allreduce: of the whole gradient.
      waits: whether no piece of it starts between the start of the combine's backward pass and the
        end of the all-to-alls, which is Lina's rule; else whenever the link is free.
      pieces: of an all-to-all.
    """
    rest = rest_ms(EXCHANGE_MS)
    tasks = [
        Task("combine", "compute", rest * BEFORE),
        Task("cut", "compute", CUT_MS / 2, (0,)),
    ]
    for name, stream, seconds in (
        ("all-to-all 1", "net", EXCHANGE_MS),
        ("ffn", "compute", FFN_MS),
        ("all-to-all 2", "net", EXCHANGE_MS),
    ):
        for piece in range(pieces):
            after = (1,) if name == "all-to-all 1" else (len(tasks) - pieces,)
            tasks.append(Task(f"{name}, {piece}", stream, seconds / pieces, after, priority=1))
    arrived = tuple(range(len(tasks) - pieces, len(tasks)))
    tasks.append(Task("join", "compute", CUT_MS / 2, arrived))
    tasks.append(Task("gate", "compute", rest * (1 - BEFORE), (len(tasks) - 1,)))
    gate = len(tasks) - 1
    piece = allreduce / GRADIENT_PIECES
    tasks += [Task("all-reduce", "net", piece, arrived if waits else ())] * GRADIENT_PIECES
    timeline = simulate(tasks, {"net": "priority"})
    return timeline.end_s[gate], max(timeline.end_s[gate + 1 :])


def fit(before: float = BEFORE) -> float:
    """The shortest all-reduce with which fair sharing gives 29.0 ms, by halving."""
    low, high = 0.0, 4 * EXCHANGE_MS
    while high - low > 1e-9:
        middle = (low + high) / 2
        if whole(middle, "shared", before=before)[0] < FAIR_MS:
            low = middle
        else:
            high = middle
    return high


def comparisons() -> list[Comparison]:
    """Figure 7: one number fitted, three predicted."""
    allreduce = fit()
    deferred, reduced = whole(allreduce, "priority", deferred=True)
    gain = reduced - in_pieces(allreduce, waits=True)[1]
    return [
        Comparison("fair-shared streams", "ms", FAIR_MS, whole(allreduce, "shared")[0], None),
        Comparison(
            "strict priority, whole tensors",
            "ms",
            PRIORITY_MS,
            whole(allreduce, "priority")[0],
            0.1,
        ),
        Comparison("all-reduce deferred", "ms", DEFERRED_MS, deferred, 0.1),
        Comparison(
            "all-reduce done sooner in pieces",
            "ms",
            GAIN_MS,
            gain,
            0.1,
            misses="how long before the layer's backward pass the gradient was ready is not "
            "printed",
        ),
    ]


def notes() -> list[str]:
    """What the model's free choices would change."""
    allreduce = fit()
    reduced = whole(allreduce, "priority", deferred=True)[1]
    by_rule, free = (reduced - in_pieces(allreduce, waits=waits)[1] for waits in (True, False))
    longest = whole(1000.0, "shared", exchange=UNDISTURBED_MS)[0]
    none, all_ = (whole(fit(part), "priority", before=part)[0] for part in (0.0, 1.0))
    return [
        f"An all-to-all takes {EXCHANGE_MS:.2f} ms and compute beside the FFN "
        f"{rest_ms(EXCHANGE_MS):.2f} ms, from printed shares; the fit makes the all-reduce "
        f"{allreduce:.2f} ms.",
        "The mean of Table 1 includes all-to-alls that shared their link. With the median slowdown "
        f"of {MEDIAN_SLOWDOWN} taken out of the backward ones an all-to-all takes "
        f"{UNDISTURBED_MS:.2f} ms, and no all-reduce makes fair sharing longer than {longest:.1f} "
        "ms: that reading cannot be fitted.",
        "The sign between the first two is not shown: where the all-reduce ends inside the first "
        "all-to-all, waiting for it and sharing with it delay the layer alike. The paper has "
        "strict priority 1.9 ms behind.",
        "With all of the other compute after the all-to-alls strict priority would take "
        f"{none:.1f} ms ({none / PRIORITY_MS - 1:+.0%}, outside), with all of it before them "
        f"{all_:.1f} ms.",
        "By Lina's rule no piece starts once the combine's backward pass has, so that the gain is "
        f"only what the pipeline hides of the FFN, {by_rule:.2f} ms. If pieces went whenever the "
        f"link is free it would be {free:.2f} ms, still {free / GAIN_MS - 1:+.0%}. By the rule, "
        f"6.6 ms would need the gradient {GAIN_MS - by_rule:.1f} ms before the layer's backward "
        "pass starts.",
    ]
