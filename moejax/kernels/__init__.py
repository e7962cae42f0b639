"""Operations on one device, each with a form that runs everywhere.

Read in this order: `select` (which implementation runs, and why), `attention`, `expert_mlp` with
`grouped_matmul`, `permute` (rows between orders), `quantize` and `quantized_rows`, `costs` (their
costs for the planner). `mosaic/` has the kernels for Hopper GPUs, `reference` the plainest
forms.
"""
