"""One train step: loss, gradients, reduction and update as one `jax.shard_map`.

Read in this order: `state` (inputs and outputs of a step), `model` (the config's choices),
`adapters` (LoRA), `per_device` (the per-device code), `full_batch` (done once for all
micro-batches), `loss`, `optimizer`, `balance` (selection biases), `forward` (evaluation and
sampling), `train_step` (the compiled functions). With pipeline stages: `pipeline/`. With an outer
loop across sites: `outer`.
"""
