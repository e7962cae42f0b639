"""Codecs: lossy formats for arrays that cross nodes.

Read `codec`: the interface; casts, blocks and error feedback; the codec that a setting names.
"""
