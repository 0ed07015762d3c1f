"""What the proxy tells about user traffic, and nothing more: no prompt, no text, no header leaves the proxy.

Invariant: of every request that `arrived` exactly one `ended` follows, after all of its `produced`, on every way out:
answered, refused by the engine, broken off by the client, failed.
"""

from collections.abc import Awaitable
from typing import Protocol


class TrafficListener(Protocol):
    """Hears of the inference requests that pass through. Times are seconds of `time.monotonic()`.

    All calls come from the event loop's thread. What one raises is logged once per kind and changes nothing for the
    request: user traffic goes on without its listener.
    """

    def arrived(self, request: str, model: str, prompt_tokens: int, now: float, streamed: bool) -> None:
        """A request is complete (or too long to be kept whole) and about to be forwarded.

        `request` is unique in this process, `model` as the body says ("" where it does not), `prompt_tokens` an
        estimate. Without `streamed` the answer comes in one piece, its one `produced` is no first token's time, and
        `prompt_tokens` has what the body asks for at most in it.
        """

    def ready(self, request: str) -> Awaitable[None] | None:
        """Whether to forward it at once (None), or once this is done: a plain or an `async` method.

        Waited for `ProxySettings.max_hold_s` at most, and not any more when the client has left.
        """

    def produced(self, request: str, tokens: int, now: float) -> None:
        """The engine sent so many tokens, 1 or more; the first call is the first token's.

        One for each streamed event, unless the engine's own `usage` says otherwise: then the last call brings what
        earlier events held beyond one each. An answer in one piece counts as one; as an answer to a request that
        was said to be streamed (embeddings do so) it brings nothing, as its time is no first token's.
        """

    def ended(self, request: str, ok: bool, now: float) -> None:
        """The engine is done with it. Not `ok`: an error's status, an error inside the stream, or broken off."""
