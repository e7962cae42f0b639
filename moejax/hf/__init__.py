"""Folders of weights in the layout of Hugging Face: read onto a mesh, and written from one.

Read in this order: `views` (one tensor and one parameter), `rules` (all of a model's), `families`
(`config.json` as settings), `files` and `reader` (a folder, distrusted), `load` (onto a mesh),
`writer` (a new folder), `adapters` (for peft). Plain NumPy up to `load`.
"""
