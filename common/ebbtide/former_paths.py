"""Warns users of a module's former path, which works for one more release."""

import sys
import warnings


def warn_moved(former: str, path: str) -> None:
    """Issue a `DeprecationWarning` that names both paths.

    Python shows it if `__main__` is to blame: the program that imports the module, or the module run by `python -m`.
    """
    text = f"{former} is now {path}; the former path ends with the next release"
    runs = sys._getframe(1).f_globals.get("__name__") == "__main__"  # noqa: SLF001 - the way to a caller's module
    warnings.warn(text, DeprecationWarning, stacklevel=2 if runs else 3)
