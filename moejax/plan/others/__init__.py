"""A plan in the settings of other trainers: MaxText, Megatron-LM and torchtitan.

Read in this order: `translation` (a translation, and the sizes it starts from), `gaps`
(parts of a plan that several trainers lack), `shapes` (names that trainers give to published
models), `maxtext`, `megatron` with `megatron_model`, `torchtitan` (one table each), `show` (prints
it). Names of settings are compared with the packages' (tests/golden/trainers.json).
"""
