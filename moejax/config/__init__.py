"""The settings of a run, read and checked before any device is touched.

Read in this order: `schema` with `model_schema` (every setting), `parts` (axes of a mesh over
nodes), `pattern` (kinds of blocks in a model), `declare` and `fields` (how settings describe
themselves), `files` (Python, YAML and JSON), `load` (files and overrides into a config),
`compression` (codecs by class of traffic and step), `checks` (settings that contradict each other
or have no effect). `command_line` is the parser of every command.
"""
