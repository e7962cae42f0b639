"""Softmax attention: one form a file.

`blocked` is the form that runs everywhere, `splash` JAX's kernel for TPUs. `sliced_attention` is
for a slice of positions, `cached_attention` for new tokens and cached keys.
"""
