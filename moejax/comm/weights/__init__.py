"""Weights: gathered from shards in forward, their gradients reduced to shards in backward.

Read in this order: `path` (mesh axes of a parameter's gather and reduction), `shard` (a parameter
as it enters a layer), `gather` (the weight), `adapters` (factors that are added to a frozen
weight), `reduce` (gradients, hop by hop), `compressed` (the hop across nodes, through a codec),
`residuals` (states of codecs), `stage_weights` (all weights once a step, for pipeline stages).
"""
