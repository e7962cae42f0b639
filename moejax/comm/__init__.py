"""All communication of a train step, per device, inside one `jax.shard_map`.

Read in this order: `wire` (the collectives), `activations` (the tensor axis), `tokens/` (the
exchange of an expert layer), `weights/` (gathers forward, reductions of gradients backward),
`codecs/` (fewer bytes on slow links), `links` (between pipeline stages), `context` (sequences that
devices share), `host` (the way to the host's memory and back). `jaxprs` finds the collectives of a
traced program, and `cpu/` rewrites them for several CPU processes.
"""
