"""One train step: loss, gradients, reduction and update as one `jax.shard_map`.

Read in this order: `state` (what a step takes and gives), `describe` (shapes and shardings of it),
`loss`, `optimizer`, `forward` (evaluation and sampling), `trainer` (the compiled functions).
"""
