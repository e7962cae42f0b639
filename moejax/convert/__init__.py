"""Other people's models in, and ours out: `moejax hf import` and `moejax hf export`.

Read `command`, then `importing` and `exporting`; the other modules serve them.
"""
