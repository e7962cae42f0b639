"""Weights from their shards forward, gradients to their shards backward.

Read in this order: `gather` (each parameter's path, and the reduction that is its transpose),
`residuals` (what codecs remember beside parameters), `compressed` (reductions through codecs).
"""
