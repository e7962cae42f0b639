"""Continues texts with a trained model, with a cache of keys and values.

Read in this order: `programs` (the compiled functions), `sampling` (how a token is drawn), `batch`
(requests that run together), `samples` (texts that were drawn), `weights` (each layer apart),
`experts` (which device holds which experts), `prompts` (texts and messages to prompts, and back),
`texts` (texts that grow, and stop strings), `placing` (devices and mesh), `flags` (of both
commands), `command` (`moejax generate`), `engine` (`moejax.Engine`), `endpoint` (`moejax serve`).
"""
