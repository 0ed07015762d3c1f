"""Decides when a client takes too long over a request. It reads no clock: callers give seconds of the monotonic clock.

Only a request's own bytes are progress. Empty lines between requests, chunk extensions and trailers are none, so they
keep no connection open. Time in which the proxy itself reads nothing does not count.
"""

from ebbtide.serving_guard.proxy.http_heads import HeadRefused
from ebbtide.serving_guard.proxy.proxy_limits import ProxySettings


class RequestPace:
    """The progress of one client's connection; `now` is when it began."""

    def __init__(self, settings: ProxySettings, now: float) -> None:
        self._settings = settings
        self.heard_at = now  # when a request last made progress, or an answer was complete
        self.body_bytes = 0  # of the body that is being read, or was read last
        self._head_since: float | None = None
        self._body_since: float | None = None
        self._paused_since: float | None = None

    @property
    def in_head(self) -> bool:
        return self._head_since is not None

    def head_began(self, now: float) -> None:
        self._head_since = self.heard_at = now

    def body_began(self, now: float) -> None:
        self._head_since, self._body_since, self.heard_at, self.body_bytes = None, now, now, 0

    def body_came(self, count: int, now: float) -> None:
        self.body_bytes += count
        self.heard_at = now

    def ended(self, now: float) -> None:
        """The request is complete."""
        self._body_since, self.heard_at = None, now

    def paused(self, now: float) -> None:
        """Reading is paused."""
        self._paused_since = now

    def resumed(self, now: float) -> None:
        if self._paused_since is None:
            return
        pause_s, self._paused_since = now - self._paused_since, None
        self.heard_at = now
        if self._head_since is not None:
            self._head_since = now
        if self._body_since is not None:
            self._body_since += pause_s

    def overdue(self, now: float) -> HeadRefused | None:
        """The refusal of a request that is overdue."""
        limits = self._settings
        if self._paused_since is not None:
            return None
        if self._head_since is not None and now - self._head_since > limits.header_timeout_s:
            return _timeout(f"the headers were not complete within {limits.header_timeout_s:g} s")
        if self._body_since is None:
            return None
        if now - self.heard_at > limits.body_timeout_s:
            return _timeout(f"no part of the body came for {limits.body_timeout_s:g} s")
        rate = limits.min_body_rate
        if rate and now - self._body_since > limits.body_timeout_s + self.body_bytes / rate:
            return _timeout(f"the body came more slowly than {rate} bytes per second")
        return None


def _timeout(message: str) -> HeadRefused:
    return HeadRefused(408, message, "timeout")
