"""Compares what clients were answered with what the engines made, as their script and their ledgers say."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from benchmarks.gateway.conversation_crowd import AnsweredTurn
from benchmarks.gateway.disturbed_fleet import RUN_ID, SCRIPT
from ebbtide.ledger import AttemptRecord
from ebbtide.types.ids import rollout_id_of_request
from tests.fakes.scripted_engine import follow

#: The owner of what is asked for under the cluster's shared secret.
_OWNER: Final = "shared-secret"


def wrong_answers(
    turns: Iterable[AnsweredTurn], ledger: Sequence[AttemptRecord], *, tokens: int, version: int
) -> list[str]:
    """The request ids whose tokens, logprobs or versions are not what engines made.

    Each turn asked for `tokens`, and the run had `version` alone.
    """
    by_rollout = defaultdict(list)
    for record in ledger:
        by_rollout[record.rollout_id].append(record)
    return [
        turn.request_id
        for turn in turns
        if turn.versions != {version} or not _is_exact(turn, by_rollout[rollout_of(turn)], tokens)
    ]


def rollout_of(turn: AnsweredTurn) -> str:
    """The id of the rollout that a turn's completion is."""
    return rollout_id_of_request(RUN_ID, _OWNER, turn.session_id, turn.request_id, 0)


def doubled_tokens(turns: Iterable[AnsweredTurn], ledger: Sequence[AttemptRecord]) -> int:
    """Tokens of these answers that engines made more than once."""
    lengths = {rollout_of(turn): len(turn.ids) for turn in turns}
    generated = sum(record.generated for record in ledger if record.rollout_id in lengths)
    return generated - sum(lengths.values())


def _is_exact(turn: AnsweredTurn, records: Sequence[AttemptRecord], tokens: int) -> bool:
    expected = follow(SCRIPT, turn.prompt_ids, tokens)
    ids, logprobs = [token for token, _ in expected], [logprob for _, logprob in expected]
    return turn.ids == ids and turn.logprobs == logprobs and _covered(records) >= tokens


def _covered(records: Iterable[AttemptRecord]) -> int:
    """The tokens from the first one on that attempts made, each from tokens that another one had made."""
    end = 0
    for record in sorted(records, key=lambda one: one.start):
        if record.start > end:
            return end
        end = max(end, record.start + record.generated)
    return end
