"""Products and MLPs of experts.

Read in this order: `expert_mlp` with `blocked_mlp`, `activation` and `expert_weights`,
`grouped_matmul` with `grouped_matmul_e4m3`, `megablox` (TPUs) and `reference` (the plainest form),
`quantize` and `quantized_rows`.
"""
