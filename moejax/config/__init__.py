"""The settings of a run, read and checked before any device is touched.

Read in this order: `schema` with `model_schema` (every setting), `declare` and `fields` (how
settings describe themselves), `files` (Python, YAML and JSON), `load` (files and overrides into a
config), `compression` (codecs by class of traffic and step), `checks` (settings that contradict
each other or have no effect).
"""
