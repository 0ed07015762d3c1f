"""Defines the errors that fail a run, or end all ranks of a trainer."""

from ebbtide.errors import EbbtideError


class RunFailed(EbbtideError):
    """The run itself is at fault and cannot go on; the message says why."""


class RankLost(EbbtideError):
    """Another rank of this trainer is gone or silent. All ranks end, and the next trainer resumes the run."""
