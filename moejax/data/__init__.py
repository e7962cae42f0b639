"""Token files, as a run reads them. No JAX here.

Read in this order: `tokenizer` (with `cuts` and `named_tokens`), `sidecar` (the description beside
a token file), `marks` (the targets among the tokens), `containers`, `tokens` (streams), `routing`
(texts with recorded experts), `sources` (the streams of a run), `corpus` (the built-in text),
`batches`, `skipped`. `prepare/` writes such files.
"""
