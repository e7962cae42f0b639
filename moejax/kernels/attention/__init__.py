"""Softmax attention: one form a file.

`blocked` is the form that runs everywhere, `splash` JAX's kernel for TPUs, `sliced_attention` of a
slice of positions, `cached_attention` of new tokens beside kept keys.
"""
