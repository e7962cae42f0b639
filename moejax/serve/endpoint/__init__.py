"""An HTTP endpoint over the batch, an OpenAI-compatible API: `moejax serve`.

Read in this order: `worker` (the thread that owns the batch), `fields` (values of a JSON body),
`jobs` (what a body asks for), `answers` (texts that grow, and their logprobs), `completions` and
`chat` (the two forms of bodies and answers), `app` (routes, and who may use them), `metrics`,
`server` (address, signals, end), `command` (`moejax serve`).
"""
