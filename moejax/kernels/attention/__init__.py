"""Softmax attention: one form a file.

`attention` is what a model's layers call. `ranged` lets each query see one range of keys, which may
come in pieces; `blocked` is its kernel that runs everywhere. `splash` is JAX's kernel for TPUs,
`tokamax` has those of that library for Hopper and Blackwell, `cached_attention` is for new tokens
and cached keys, `chosen` for keys that an indexer chose.
"""
