"""One train step: loss, gradients, reduction and update as one `jax.shard_map`.

Read in this order: `state` (what a step takes and gives), `model` (what the config chose),
`adapters` (LoRA), `per_device` (the per-device code), `loss`, `optimizer`, `forward` (evaluation
and sampling), `train_step` (the compiled functions). With pipeline stages: `pipeline/`.
"""
