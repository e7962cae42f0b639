"""Builds the codec that a setting names."""

from moejax.comm.codecs.codec import Blocks, Cast, Codec, ErrorFeedback
from moejax.config.compression import CodecSpec

LOCO_AVERAGE, LOCO_RESET = 0.5, 512


def build_codec(spec: CodecSpec) -> Codec:
    """Builds the codec of a gradient from its config."""
    if spec.name == "loco":
        blocks = Blocks("int4", spec.block, kernel=spec.kernel)
        return ErrorFeedback(blocks, LOCO_AVERAGE, "e4m3", spec.block, LOCO_RESET)
    codec = _plain_codec(spec)
    return ErrorFeedback(codec) if spec.feedback else codec


def build_plain_codec(spec: CodecSpec | None) -> Codec | None:
    """Builds a codec without state, for tokens or weights; None for None."""
    return None if spec is None else _plain_codec(spec)


def _plain_codec(spec: CodecSpec) -> Codec:
    if spec.name == "bfloat16":
        return Cast()
    return Blocks(spec.name, spec.block, spec.kernel, spec.rows_kernel)
