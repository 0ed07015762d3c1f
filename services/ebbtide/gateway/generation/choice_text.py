"""Turns the token chunks of one completion into deltas of its text. Pure.

A completion ends where its rollout ends, or with the token whose text completes a stop string. What came behind that
token is dropped: it is neither shown nor counted.
"""

from collections.abc import Sequence

from ebbtide.gateway.generation.choice_delta import ChoiceDelta, ChoiceFinish
from ebbtide.gateway.text.detokenizer import Detokenizer
from ebbtide.gateway.text.output_parsers import OutputDelta, OutputParser
from ebbtide.gateway.text.stop_strings import StopStrings
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TokenArray


class ChoiceText:
    """One completion. `finished` is set by the delta that ends it."""

    def __init__(
        self,
        index: int,
        decoder: Detokenizer,
        *,
        stops: StopStrings | None = None,
        parser: OutputParser | None = None,
        whole: bool = False,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        keep_stop: bool = False,
    ) -> None:
        """`whole`: parse the text at its end. `stop_ids`: the client's stop tokens. `min_tokens`: within so many tokens
        no stop string counts.
        """
        self._index, self._decoder, self._stops, self._parser = index, decoder, stops, parser
        self._stop_ids, self._min_tokens, self._keep_stop = frozenset(stop_ids), min_tokens, keep_stop
        self._unparsed: list[str] | None = [] if whole and parser is not None else None
        self._ids: list[int] = []  # of the unparsed text
        self._decoded = 0
        self._last = -1
        self.finished = False
        self.stopped_early = False  # at a stop string, so that the rollout may still run

    def may_parse_whole(self, reason: FinishReason | None) -> bool:
        """Whether a chunk with this reason may end the completion, so that `push` parses all of its text."""
        return self._unparsed is not None and (reason is not None or self._stops is not None)

    def push(self, tokens: TokenArray, reason: FinishReason | None) -> ChoiceDelta:
        """The delta of a chunk, which may be empty. `reason`: STOP or LENGTH with the last chunk."""
        ids: list[int] = tokens["id"].tolist()
        self._last = ids[-1] if ids else self._last
        used, text, met = self._search(ids)
        finish = None
        if met is not None:
            tokens, finish = tokens[:used], ChoiceFinish(reason="stop", stop=met)
            self.stopped_early = True
        elif reason is not None:
            text, finish = text + self._rest(), self._finish(reason)
        self.finished = finish is not None
        return self._delta(tokens, text, finish)

    def _search(self, ids: list[int]) -> tuple[int, str, str | None]:
        """How many tokens count, their text, and the stop string that the last of them completes."""
        early = max(0, min(len(ids), self._min_tokens - self._decoded))
        self._decoded += len(ids)
        if self._stops is None:
            return len(ids), self._decoder.push(ids), None
        texts = [self._decoder.push(ids[:early])] if early else []
        for number, token in enumerate(ids[early:], early + 1):
            text, met = self._stops.push(self._decoder.push((token,)))
            texts.append(text)
            if met is not None:
                texts.append(met if self._keep_stop else "")
                return number, "".join(texts), met
        return len(ids), "".join(texts), None

    def _rest(self) -> str:
        text = self._decoder.end()
        if self._stops is None:
            return text
        shown, met = self._stops.push(text)
        return shown + (self._stops.end() if met is None else "")

    def _finish(self, reason: FinishReason) -> ChoiceFinish:
        if reason is FinishReason.LENGTH:
            return ChoiceFinish(reason="length")
        return ChoiceFinish(reason="stop", stop=self._last if self._last in self._stop_ids else None)

    def _delta(self, tokens: TokenArray, text: str, finish: ChoiceFinish | None) -> ChoiceDelta:
        parts = self._parsed(text, tokens["id"].tolist(), ends=finish is not None)
        return ChoiceDelta(
            index=self._index,
            tokens=tokens,
            text="".join(part.content for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=tuple(call for part in parts for call in part.tool_calls),
            finish=finish,
        )

    def _parsed(self, text: str, ids: list[int], *, ends: bool) -> list[OutputDelta]:
        if self._parser is None:
            return [OutputDelta(content=text)]
        if self._unparsed is None:
            pushed = self._parser.push(text, ids)
            return [pushed, self._parser.end()] if ends else [pushed]
        self._unparsed.append(text)
        self._ids += ids
        return [self._parser.whole("".join(self._unparsed), self._ids)] if ends else []
