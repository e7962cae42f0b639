"""The version, for whoever must not import more."""

__version__ = "0.1.0"
