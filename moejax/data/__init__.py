"""From text to batches. No JAX here.

Read in this order: `prepare` (the command), `documents`, `cuts`, `tokenizer`, `writers`, `sidecar`
(the description beside a token file), `tokens` (streams), `sources` (those of a run), `corpus` (the
built-in text), `batches`.
"""
