"""Declares the events that the proxy reports about user traffic. No prompt, text or header leaves the proxy.

Invariant: for every request that `arrived`, exactly one `ended` follows, after all of its `produced`, whether the
request is answered, refused by the engine, cancelled by the client or fails.
"""

from collections.abc import Awaitable
from typing import Protocol


class TrafficListener(Protocol):
    """Receives events of inference requests. Times are seconds of `time.monotonic()`.

    All calls come from the event loop's thread. An exception is logged once per kind of event, and does not affect the
    request.
    """

    def arrived(self, request: str, model: str, prompt_tokens: int, now: float, streamed: bool) -> None:
        """A request is complete (or too long to keep) and about to be forwarded.

        `request` is unique in this process, `model` is from the body ("" if it names none), `prompt_tokens` is an
        estimate. Without `streamed` the answer comes in one piece: its one `produced` is not the time of a first token,
        and `prompt_tokens` includes the most tokens that the body asks for.
        """

    def ready(self, request: str) -> Awaitable[None] | None:
        """Forward the request at once (None), or once the result is done. A plain or an `async` method.

        The proxy waits for `ProxySettings.max_hold_s` at most, and no longer than its client.
        """

    def produced(self, request: str, tokens: int, now: float) -> None:
        """The engine sent `tokens`, 1 or more; the first call is for the first token.

        Each streamed event counts as one token, unless the engine's `usage` says otherwise: then the last call brings
        the rest. An answer in one piece counts as one token, but as nothing if its request was said to be streamed (as
        with embeddings), because it does not show the time of a first token.
        """

    def ended(self, request: str, ok: bool, now: float) -> None:
        """The engine is done with the request. Not `ok`: an error status, an error in the stream, or incomplete."""
