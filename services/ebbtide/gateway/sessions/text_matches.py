"""Finds the longest earlier path whose text a new prompt begins with. Pure."""

from collections.abc import Iterator, Mapping

from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.sessions.message_digests import prefix_digests
from ebbtide.gateway.sessions.token_tree import PathKey, TokenPrefix, TokenTree
from ebbtide.gateway.sessions.turn_matching import CONTEXT_IDS, response_text, without_ends
from ebbtide.gateway.sessions.turn_record import TurnRecord


class TextMatches:
    """Compares prompts with the texts of paths: a turn's prompt as it was rendered, and the text that was sampled."""

    def __init__(self, tree: TokenTree, records: Mapping[int, TurnRecord], model: ServedModel) -> None:
        self._tree, self._records, self._model = tree, records, model

    def longest(self, text: str, *, raw: bool) -> tuple[TokenPrefix, str]:
        """Returns the path's ids and the rest of `text`; no path and all of `text` if it begins with none.

        In a rendered chat (not `raw`), an answer counts only if the end of its turn follows: as a part of another
        answer its tokens would be cut where the client's text is not.
        """
        encoded = text.encode()
        best, matched = TokenPrefix(None, 0), 0
        found = prefix_digests(encoded, [record.text_bytes for record in self._records.values()])
        for number, record in sorted(self._records.items()):
            if not record.text_bytes or found.get(record.text_bytes) != record.text:
                continue
            for prefix, end in self._paths(number, encoded, record.text_bytes, raw=raw):
                if end > matched:
                    best, matched = prefix, end
        return best, encoded[matched:].decode()

    def _paths(self, number: int, text: bytes, at: int, *, raw: bool) -> Iterator[tuple[TokenPrefix, int]]:
        """Yields the turn's prompt, which ends at byte `at`, and its completions that follow; and where these end."""
        start = self._tree.prompt_length(number)
        yield TokenPrefix(PathKey(number), start), at
        context = self._tree.prompt(number)[-CONTEXT_IDS:].tolist()
        for key in self._tree.completions(number):
            sampled = self._tree.sampled(key).tolist()
            ended = without_ends(sampled, self._model)
            for ids in (sampled, ended):
                said = response_text(context, ids, self._model).encode()
                if said and text.startswith(said, at) and (raw or self._ends(sampled, ids, text, at + len(said))):
                    yield TokenPrefix(key, start + len(ids)), at + len(said)

    def _ends(self, sampled: list[int], ids: list[int], text: bytes, at: int) -> bool:
        """Whether an answer is complete: its end token is among `ids`, or was not sampled and is at byte `at`."""
        if len(sampled) > len(without_ends(sampled, self._model)):
            return len(ids) == len(sampled)
        return any(text.startswith(self._model.token_text(end).encode(), at) for end in self._model.eos_ids)
