"""Holds what a simulated engine knows of one sequence."""

from ebbtide.simulator.engines.kv_prefixes import KvPrefix


class EngineSequence:
    """A prompt and its response, from admission on. Tokens, unless stated."""

    __slots__ = (
        "after",
        "again",
        "base",
        "cached",
        "decoding",
        "ends",
        "fed",
        "key",
        "length",
        "made",
        "order",
        "parent",
        "prefix",
        "prompt",
        "ready",
        "salt",
        "start",
        "started",
        "text",
    )

    def __init__(
        self,
        key: str,
        prompt: int,
        made: int,
        length: int,
        prefix: str,
        after: tuple[str, ...],
        cached: int,
        text: str,
        ready: float,
    ) -> None:
        self.key, self.prompt, self.length = key, prompt, length
        self.prefix, self.after, self.cached, self.text = prefix, after, cached, text  # see `SimulatedEngine.admit`
        self.ready = ready  # when a step may begin to read it, in the engine's own time
        self.made = made  # of the response when it last began to be read
        self.fed = 0  # read so far, those found in the cache included
        self.again = made > 0  # what it reads was read or made before, here or elsewhere
        self.started = False  # its first new token was reported
        self.decoding = False
        self.base = self.ends = 0  # see `DecodingBatch`
        self.order = 0  # of its start among all of the engine
        self.parent: KvPrefix | None = None  # whose blocks it shares
        self.start = 0  # blocks that it shares
        self.salt = 0  # of the weights that read it

    @property
    def known(self) -> int:
        """All that must be read before it decodes."""
        return self.prompt + self.made

    def made_after(self, step: int) -> int:
        """Tokens of its response after a step."""
        return self.base + step if self.decoding else self.made

    def fed_in(self, step: int) -> int:
        """Tokens whose keys and values it has in a step."""
        return self.prompt + self.base - 1 + step if self.decoding else self.fed

    def stop(self) -> None:
        """It has no blocks any more. If it goes on, all its tokens are read again."""
        self.again = self.again or self.fed > 0
        self.parent, self.start, self.fed = None, 0, 0
