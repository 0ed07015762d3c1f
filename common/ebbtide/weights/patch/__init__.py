"""Exact patches between policy versions: what changed in a tensor, in as few bytes as its entropy allows.

Pure functions over numpy arrays and bytes; `layout` describes the bytes and `alphabet` how changes become letters.
Needs `zstandard`; with `numba` the kernels are compiled. Neither is imported before its first use.
"""
