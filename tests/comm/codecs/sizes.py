"""What codecs send, in bytes."""

from moejax.comm.codecs.codec import Blocks, ErrorFeedback
from moejax.kernels.experts.quantize import bytes_of


def wire_bytes(codec, size):
    """Bytes of a payload of `size` values, with padding and scales."""
    if isinstance(codec, ErrorFeedback):
        return wire_bytes(codec.codec, size)
    blocks = isinstance(codec, Blocks)
    return bytes_of(size, codec.format, block=codec.block) if blocks else 2 * size
