"""Weights from their shards forward, gradients to their shards backward.

Read in this order: `path` (the axes of a parameter's gather and reduction), `gather`, `reduce` (its
transpose, hop by hop), `compressed` (the hop across nodes through a codec), `residuals` (what
codecs remember, on its way through backward), `states` (its shapes and shardings).
"""
