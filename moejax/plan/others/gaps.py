"""Parts of a plan that no other trainer here has, or that several lack, as sentences."""

from collections.abc import Iterable
from dataclasses import fields

from moejax.config.compression import STAGES, Codecs, build_compression
from moejax.config.schema import Config
from moejax.plan.others.translation import Gap, has_chunks

# Whether the plan has a part, the part, and the trainer's way in its place.
Row = tuple[bool, str, str]
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


def gaps_of(rows: Iterable[Row]) -> list[Gap]:
    """Returns the gaps that the plan has."""
    return [Gap(what, instead) for has, what, instead in rows if has]


def codec_gaps(cfg: Config) -> list[Gap]:
    """Returns a gap for each class of traffic that the plan compresses between nodes."""
    policy, gaps = build_compression(cfg.compression), []
    for name in (entry.name for entry in fields(Codecs)):
        specs = list(dict.fromkeys(map(str, policy.all_of(name))))
        if specs and (cfg.mesh.stage > 1 or name not in STAGES):
            when = ", changed at steps of the run" if len(specs) > 1 else ""
            what = f"codec of {CLASSES[name]} between nodes: {' then '.join(specs)}{when}"
            gaps.append(Gap(what, "sends them uncompressed, so more bytes cross nodes"))
    return gaps


def ends_row(cfg: Config) -> Row:
    """Returns the row of embedding and loss, which are spread over stages."""
    instead = "has the embedding on the first stage and the loss on the last"
    return cfg.mesh.stage > 1, "embedding and loss are spread over the stages", instead


def slices_row(cfg: Config) -> Row:
    """Returns the row of slices of sequences that follow one another through stages."""
    count = cfg.mesh.stage_slices
    return count > 1, f"{count} slices of a sequence", "passes whole sequences on"


def sharing_text(cfg: Config) -> str:
    """Returns how many devices share a sequence."""
    count = cfg.mesh.context
    return "sequences stay whole" if count == 1 else f"{count} devices share each sequence"


def sharing_row(cfg: Config, instead: str) -> Row:
    """Returns the row of sequences that devices share.

    Args:
      instead: the trainer's way in its place.
    """
    mesh = cfg.mesh
    what = f"{sharing_text(cfg)}, dealt in stripes of {mesh.context_stripe} positions"
    return mesh.context > 1, f"{what}, keys by {mesh.context_exchange}", instead


def across_row(cfg: Config) -> Row:
    """Returns the row of weights that are gathered across nodes first, then inside."""
    what = "weights gathered across nodes first, then inside the node"
    instead = "gathers them in one collective over all devices"
    return cfg.mesh.gather_across != "flat", what, instead


def host_row(cfg: Config) -> Row:
    """Returns the row of arrays in the host's memory."""
    kinds = [name for name, place in vars(cfg.memory).items() if place == "host"]
    what = f"in the host's memory: {', '.join(kinds)}"
    return bool(kinds), what, "has them on the device; it may offload by settings of its own"


def dense_row(cfg: Config, instead: str) -> Row:
    """Returns the row of dense weights that are gathered and reduced once a step."""
    has = cfg.mesh.gather_dense == "step" and cfg.mesh.fsdp * cfg.mesh.expert > 1
    return has, "dense weights gathered, and their gradients reduced, once a step", instead


def pieces_row(cfg: Config, instead: str) -> Row:
    """Returns the row of gradients that are reduced in pieces."""
    size = cfg.train.reduction_bytes
    what = f"gradients reduced in pieces of {(size or 0) / 2**20:.3g} MiB"
    return size is not None, what, instead


def chunks_row(cfg: Config, instead: str) -> Row:
    """Returns the row of an exchange in chunks that overlap with the experts' products."""
    forward, backward = cfg.route_chunks, cfg.route_chunks_backward or cfg.route_chunks
    what = f"exchange of tokens in chunks ({forward} forward, {backward} backward), which overlap"
    return has_chunks(cfg), what, instead


def trim_row(cfg: Config) -> Row:
    """Returns the row of buckets that send only filled rows."""
    instead = "has sizes of messages of its own"
    return cfg.route_trim, "only filled rows of buckets travel", instead


def whole_row(cfg: Config, instead: str) -> Row:
    """Returns the row of experts that are copied to every tensor rank."""
    has = cfg.mesh.tensor > 1 and cfg.mesh.expert_weights == "whole" and cfg.model.has_experts
    return has, "a copy of each expert on every tensor rank (whole)", instead
