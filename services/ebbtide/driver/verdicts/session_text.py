"""Turns a session's trajectories into the texts that its verifier reads."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from ebbtide.claimed_runs.conversation import Conversations
from ebbtide.driver.isolation.host_messages import BranchText
from ebbtide.types.rollout import Trajectory
from ebbtide.types.session import UnverifiedSession
from ebbtide.types.tokens import unpack_ids, unpack_tokens


def branch_texts(session: UnverifiedSession, conversations: Conversations) -> list[BranchText]:
    """The texts of a session's branches, in the order of their last turns. Takes milliseconds for a long session."""
    ordered = sorted(session.trajectories, key=_number)
    return [BranchText(tuple(_passages(one, conversations)), one.truncated) for one in ordered]


def client_data(session: UnverifiedSession) -> bytes:
    """What the session's client gave with its end, as a JSON object."""
    return session.data or msgspec.json.encode({})


def _number(trajectory: Trajectory) -> tuple[int, str]:
    """Gateways number branches behind a dot."""
    number = trajectory.episode_id.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0, trajectory.episode_id


def _passages(trajectory: Trajectory, conversations: Conversations) -> Iterator[tuple[str, bool]]:
    """Texts in turn, and whether they were sampled."""
    yield conversations.raw_text(unpack_ids(trajectory.prompt_ids).tolist()), False
    tokens = unpack_tokens(trajectory.tokens)
    # Only sampled tokens have a version: a mask 0 may also be of one that another branch counts.
    sampled = tokens["version"] != 0
    ids = tokens["id"]
    for start, end in _runs(sampled):
        part: Sequence[int] = ids[start:end].tolist()
        if sampled[start]:
            yield conversations.text(part), True
        else:
            yield conversations.raw_text(part), False


def _runs(mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where equal values stand together."""
    if not len(mask):
        return
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    yield from pairwise(edges)
