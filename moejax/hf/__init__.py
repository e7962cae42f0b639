"""Folders of weights in the layout of Hugging Face: read onto a mesh, and written from one.

Read in this order: `views` (one tensor and one parameter), `rules` (all of a model's), `families`
with `config` (`config.json` as settings), `model` (a config's, without a mesh), `files` and
`reader` (a folder, distrusted; `text`: of a model inside another), `load` (onto a mesh), `writer`
(a new folder), `adapters` (for peft). `origin` keeps small files for an export, `in_flight` bounds
the bytes of several threads.
Plain NumPy up to `load`.
"""
