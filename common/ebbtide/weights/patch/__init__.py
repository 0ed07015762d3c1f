"""Makes exact patches between policy versions, in about as few bytes as the changes' entropy allows.

Pure functions over numpy arrays and bytes; `tile_format` describes the bytes and `alphabet` how changes become symbols.
Needs `zstandard`; with `numba` the kernels are compiled. Neither is imported before its first use.
"""
