"""Codecs: lossy formats for arrays that cross nodes.

Read in this order: `codec` (the interface; casts, blocks and error feedback), `build` (the codec
that a setting names).
"""
