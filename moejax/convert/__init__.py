"""Other people's models in, and ours out: `moejax hf import` and `moejax hf export`.

Read in this order: `command`, `importing`, `exporting` with `adapters` (LoRA) and `texts`
(tokenizer and its like) and `around` (a model of images); `output` writes the folder of either.
`upcycling` makes experts of a dense model (`moejax upcycle`, whose flags are in `upcycle_command`).
"""
