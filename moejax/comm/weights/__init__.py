"""Weights: gathered from shards in forward, their gradients reduced to shards in backward.

Read in this order: `path` (mesh axes of a parameter's gather and reduction), `gather` (the weight),
`adapters` (what is added to a frozen weight), `reduce` (gradients, hop by hop), `compressed` (the
hop across nodes, through a codec), `residuals` (codec states on their way through backward),
`states` (their shapes and shardings).
"""
