"""The errors by which work fails its run, and by which the ranks of a trainer end together."""

from ebbtide.errors import EbbtideError


class RunFailed(EbbtideError):
    """The run itself is at fault and cannot go on; the message says why."""


class RankLost(EbbtideError):
    """Another rank of this trainer is gone or silent: all of them end, and the next trainer resumes the run."""
