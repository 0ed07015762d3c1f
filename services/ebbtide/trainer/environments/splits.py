"""Keeps the former path of `ebbtide.environments.problem_splits`."""

from ebbtide.environments.problem_splits import split_of
from ebbtide.former_paths import warn_moved

__all__ = ["split_of"]

warn_moved(__name__, "ebbtide.environments.problem_splits")
