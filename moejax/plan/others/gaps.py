"""Parts of a plan that no other trainer here has, or that several lack, as sentences."""

from dataclasses import fields

from moejax.config.compression import STAGES, Codecs, build_compression
from moejax.config.schema import Config
from moejax.plan.others.translation import Gap, has_chunks

# Classes of traffic in words.
CLASSES = {
    "dense_gradient": "gradients of weights outside the experts",
    "expert_gradient": "gradients of experts' weights",
    "dispatch": "tokens on their way to experts",
    "combine": "experts' results",
    "dispatch_backward": "gradients of dispatched tokens",
    "combine_backward": "gradients of results",
    "weights": "gathered weights",
    "stage": "hidden states between pipeline stages",
    "stage_gradient": "gradients between pipeline stages",
}


def codec_gaps(cfg: Config) -> list[Gap]:
    """Returns a gap for each class of traffic that the plan compresses between nodes."""
    policy, gaps = build_compression(cfg.compression), []
    sent = [entry.name for entry in fields(Codecs)]
    for name in sent if cfg.mesh.stage > 1 else [n for n in sent if n not in STAGES]:
        specs = list(dict.fromkeys(map(str, policy.all_of(name))))
        if specs:
            when = ", changed at steps of the run" if len(specs) > 1 else ""
            gaps.append(
                Gap(
                    f"codec of {CLASSES[name]} between nodes: {' then '.join(specs)}{when}",
                    "sends them uncompressed, so more bytes cross nodes",
                )
            )
    return gaps


def stage_gaps(cfg: Config) -> list[Gap]:
    """Returns the gaps of slices, and of embedding and loss, which are spread over stages."""
    if cfg.mesh.stage == 1:
        return []
    what = "embedding and loss are spread over the stages"
    alone = Gap(what, "has the embedding on the first stage and the loss on the last")
    return [alone, *slice_gaps(cfg)]


def slice_gaps(cfg: Config) -> list[Gap]:
    """Returns the gap of slices of sequences that follow one another through stages."""
    count = cfg.mesh.stage_slices
    return [Gap(f"{count} slices of a sequence", "passes whole sequences on")] if count > 1 else []


def across_gaps(cfg: Config) -> list[Gap]:
    """Returns the gap of weights that are gathered across nodes first, then inside."""
    if cfg.mesh.gather_across == "flat":
        return []
    what = "weights gathered across nodes first, then inside the node"
    return [Gap(what, "gathers them in one collective over all devices")]


def reduction_gaps(cfg: Config, instead: str) -> list[Gap]:
    """Returns the gap of gradients that are reduced in pieces.

    Args:
      instead: text about the trainer's own way.
    """
    if cfg.train.reduction_bytes is None:
        return []
    size = cfg.train.reduction_bytes / 2**20
    return [Gap(f"gradients reduced in pieces of {size:.3g} MiB", instead)]


def chunk_gaps(cfg: Config, instead: str) -> list[Gap]:
    """Returns the gap of an exchange in chunks that overlap with the experts' products.

    Args:
      instead: text about the trainer's own way.
    """
    if not has_chunks(cfg):
        return []
    forward, backward = cfg.route_chunks, cfg.route_chunks_backward or cfg.route_chunks
    what = f"exchange of tokens in chunks ({forward} forward, {backward} backward), which overlap"
    return [Gap(what, instead)]


def trim_gaps(cfg: Config) -> list[Gap]:
    """Returns the gap of buckets that send only filled rows."""
    if not cfg.route_trim:
        return []
    return [Gap("only filled rows of buckets travel", "has sizes of messages of its own")]


def whole_experts_gaps(cfg: Config, instead: str) -> list[Gap]:
    """Returns the gap of experts that are copied to every tensor rank.

    Args:
      instead: text about the trainer's own way.
    """
    if cfg.mesh.tensor == 1 or cfg.mesh.expert_weights != "whole" or not cfg.model.has_experts:
        return []
    return [Gap("a copy of each expert on every tensor rank (whole)", instead)]
