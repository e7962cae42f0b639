"""Kernels for NVIDIA Hopper, in Pallas' Mosaic GPU dialect; each has its reference one level up.

Read in this order: `tiles` (shared parts of products), `grouped_matmul`, `grouped_outer` (gradients
of weights), `grouped_matmul_e4m3`, `quantize`, `quantized_rows` (while they move). Imported only
where a kernel is used: JAX before 0.11 lacks parts of the dialect.
"""
