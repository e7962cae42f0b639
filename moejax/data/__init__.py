"""From text to batches. No JAX here.

Read in this order: `prepare` (the command), `rows`, `documents`, `cuts`, `tokenizer`, `writers`,
`sidecar` (the description beside a token file), `marks` (what of it is learned), `containers`,
`tokens` (streams), `sources` (those of a run), `corpus` (the built-in text), `batches`.
Conversations: `chat`, `conversations`, `chat_template`, `control_tokens`, `answers`.
"""
