"""The expert layer.

Read in this order: `layer` (its forward, step by step), `router`, `quantile` (biases by quantiles),
`copies` (of hot experts on other devices), `dispatch` (experts along a route, and overflow rounds),
`sizes` (static sizes of buckets).
"""
