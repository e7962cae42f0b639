"""The mixers of tokens, a file for each kind: what takes information from position to position.

Read in this order: `interface` (what a block, a cache and counts ask of each), `attention`,
`latent`, `sparse`, `states` (what mixers with a state share), `delta`, `mamba`. `model.block` has
the table of them.
"""
