"""Kernels for NVIDIA Hopper, in Pallas' Mosaic GPU dialect; each has its reference one level up.

Imported only where a kernel is used: JAX before 0.11 lacks parts of the dialect.
"""
