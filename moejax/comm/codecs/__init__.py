"""Codecs: lossy formats for arrays that cross nodes.

Read in this order: `codec` (the interface; casts and blocks), `feedback`, `build` (the codec that a
setting names).
"""
