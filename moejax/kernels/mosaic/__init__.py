"""Kernels for NVIDIA Hopper, in Pallas' Mosaic GPU dialect; each has its reference one level up.

Imported where a kernel is taken and nowhere else: JAX before 0.11 has no such dialect to speak of.
"""
