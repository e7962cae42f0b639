"""The language model around the expert layers.

Read in this order: `transformer` (blocks, scanned), `block`, `mixers/` (attention and other mixers
of tokens) with `rope`, `layers` (norm, dense MLP, embedding), `remat` (what backward recomputes),
`ahead` (multi-token prediction), `context` and `ring` (sequences that devices share), `cached`
(decoding with a cache), `count` (parameters and FLOPs).
"""
