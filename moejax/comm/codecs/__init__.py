"""Codecs of what travels between nodes.

Read in this order: `codec` (what a codec is; casts and blocks), `topk`, `feedback`, `adaptive`,
`low_rank` (for sums, by `weights/compressed`), `build` (the one that a setting names), `pack`
(several arrays as one message).
"""
