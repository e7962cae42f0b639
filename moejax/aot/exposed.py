"""Compresses only exposed traffic (Optimus-CC), as the compiled schedule shows it.

Traffic that overlaps matrix products costs no time, so a codec would add error and work without
a gain.
"""

from collections.abc import Iterable

from moejax.aot.compiled import Exchange
from moejax.config.compression import PRESETS
from moejax.layout.layout import Layout


def traffic_of(exchange: Exchange, layout: Layout) -> str | None:
    """Returns a collective's traffic class, or None if no codec applies.

    The compiled program does not name what it sends: both directions of tokens count as one class
    here, and so do gradients of dense weights and of experts, which cross nodes on the same axes.
    """
    if "float" not in exchange.dtype or not set(exchange.axes) & set(layout.slow):
        return None
    if exchange.kind == "all_to_all":
        return "tokens_backward" if exchange.backward else "tokens"
    if exchange.kind == "all_gather" and set(exchange.axes) & set(layout.fsdp + layout.expert):
        return "weights"
    if exchange.kind in ("all_reduce", "reduce_scatter") and exchange.backward:
        return "gradients"
    return None


CLASSES = {
    "tokens": ("dispatch", "combine"),
    "tokens_backward": ("dispatch_backward", "combine_backward"),
    "gradients": ("dense_gradient", "expert_gradient"),
}


def hidden_shares(exchanges: Iterable[Exchange], layout: Layout) -> dict[str, float]:
    """Returns the share of each class's bytes across nodes that overlap a matrix product."""
    total: dict[str, int] = {}
    hidden: dict[str, int] = {}
    for exchange in exchanges:
        kind = traffic_of(exchange, layout)
        if kind is not None:
            total[kind] = total.get(kind, 0) + exchange.calls * exchange.bytes
            hidden[kind] = hidden.get(kind, 0) + exchange.calls * exchange.bytes * exchange.hides
    return {kind: hidden[kind] / max(total[kind], 1) for kind in total}


def compress_exposed(
    exchanges: Iterable[Exchange], layout: Layout, preset: str, *, hidden_above: float = 0.5
) -> dict[str, str]:
    """Returns the settings of `compression` that leave hidden classes as they are.

    Args:
      exchanges: exchanges of the step compiled without codecs.
      preset: preset with the codecs of the exposed classes.
      hidden_above: share of bytes above which a class counts as hidden.
    """
    chosen = {"preset": "none"}
    for kind, share in hidden_shares(exchanges, layout).items():
        if share <= hidden_above:
            for name in CLASSES.get(kind, (kind,)):
                if name in PRESETS[preset]:
                    chosen[name] = PRESETS[preset][name]
    return chosen
