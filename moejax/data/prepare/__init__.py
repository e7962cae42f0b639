"""From text to token files: `moejax prepare`. A training run imports nothing of it.

Read in this order: `command` with `flags`, `inputs` and `rows` (files), `documents`, `split` (what
is held out), `writers`. Conversations: `chat`, `conversations`, `chat_template`, `control_tokens`,
`answers`.
"""
