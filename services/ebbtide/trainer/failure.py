"""The error by which work fails its run."""

from ebbtide.errors import EbbtideError


class RunFailed(EbbtideError):
    """The run itself is at fault and cannot go on; the message says why."""
