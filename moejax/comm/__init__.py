"""All communication of a train step, per device, inside one `jax.shard_map`.

Read in this order: `wire` (the collectives), `activations` (the tensor axis), `tokens/` (the
exchange of an expert layer), `weights/` (gathers forward, reductions of gradients backward),
`codecs/` (what travels in fewer bytes). `gloo` and `jaxprs` make programs run on CPU processes.
"""
