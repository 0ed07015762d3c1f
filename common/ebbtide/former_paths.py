"""Warns importers of a module's former path, which works for one more release."""

import warnings


def warn_moved(former: str, path: str) -> None:
    """Issue a `DeprecationWarning` that names both paths."""
    text = f"{former} is now {path}; the former path ends with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
