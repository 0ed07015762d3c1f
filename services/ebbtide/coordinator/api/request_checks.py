"""Refuses invalid requests as early as possible, each by the name of its field."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from ebbtide.coordinator.api.lists import paced
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import EbbtideError, InvalidRequest, StoreUnavailable
from ebbtide.types.fleet import EngineInfo
from ebbtide.types.ids import check_id
from ebbtide.types.prompt_scores import check_records
from ebbtide.types.rollout import (
    MAX_CLIENT_DIGEST,
    MAX_NUMBER,
    MAX_UNSETTLED,
    RolloutKind,
    RolloutRequest,
    SubmitOrder,
    Trajectory,
)
from ebbtide.types.run import ROLES, LeaseRef, check_sampling, is_gateway
from ebbtide.types.tokens import TOKEN_BYTES, token_count, unpack_ids

#: Rollouts in one call: one store script takes them all, and blocks others meanwhile.
MAX_BATCH: Final = 4096
#: A rollout's prompt and tokens travel in one message when it is resumed or finished; messages are at most 4 MiB.
_MAX_BYTES: Final = (4 << 20) - (128 << 10)
#: Digits of a place in a list, which the store keeps as a double.
_DIGITS: Final = 15


def check_batch(items: Sequence[object], *, field: str) -> None:
    if len(items) > MAX_BATCH:
        raise InvalidRequest(f"at most {MAX_BATCH} in one call; send several", field=field)


def check_lease(lease: LeaseRef, *, field: str = "lease", role: str = "", gateways: bool = False) -> LeaseRef:
    """Check that the lease is well formed, and of `role` if given. `gateways`: those of gateways will do, too."""
    check_id(lease.run_id, field=f"{field}.run_id")
    if gateways and is_gateway(lease.role):
        check_id(lease.role.partition("/")[2], field=f"{field}.role")
    elif lease.role not in ROLES:
        raise InvalidRequest(f"must be one of {', '.join(ROLES)}", field=f"{field}.role")
    if role and lease.role != role:
        raise InvalidRequest(f"only the {role} lease allows this", field=f"{field}.role")
    if not lease.fence:
        raise InvalidRequest("is required: claim the run first", field=f"{field}.fence")
    return lease


def check_reason(reason: str, *, field: str) -> str:
    """Check a reason as an id: it becomes a counter's name."""
    return check_id(reason, field=field) if reason else reason


async def check_rollouts(
    requests: Sequence[RolloutRequest], engines: Sequence[EngineInfo], run: RunState, lease: LeaseRef
) -> None:
    """Refuse rollouts that no attached engine could generate, no message could carry, or the lease is not for. What a
    worker's context held that left may come: it waits for another.
    """
    spec = run.spec
    check_batch(requests, field="rollouts")
    _check_kinds(requests, lease)
    context = spec.max_model_len or max(run.context, *(engine.max_model_len for engine in engines), 0)
    vocabulary = max((engine.vocab_size for engine in engines), default=0)
    total = index = 0
    async for page in paced(requests):
        for request in page:
            _check_rollout(request, f"rollouts[{index}]", context, vocabulary)
            total, index = total + len(request.prompt_ids), index + 1
    if total > spec.quota_bytes:
        raise InvalidRequest(
            f"{total} bytes of prompts are more than the run's quota_bytes ({spec.quota_bytes}); send fewer at a time",
            field="rollouts",
        )


def _check_kinds(requests: Sequence[RolloutRequest], lease: LeaseRef) -> None:
    gateway = is_gateway(lease.role)
    for index, request in enumerate(requests):
        if (request.kind is RolloutKind.REQUEST) is not gateway:
            text = "a gateway's lease takes requests only" if gateway else "only a gateway's lease takes requests"
            raise InvalidRequest(text, field=f"rollouts[{index}].kind")
        if request.sampling.without_logprobs and not gateway:
            text = "the trainer needs the logprobs of what it trains on; leave it out"
            raise InvalidRequest(text, field=f"rollouts[{index}].sampling.without_logprobs")


def _check_rollout(request: RolloutRequest, field: str, context: int, vocabulary: int) -> None:
    for name in ("rollout_id", "group_id", "episode_id"):
        check_id(getattr(request, name), field=f"{field}.{name}")
    check_sampling(request.sampling, field=f"{field}.sampling")
    if request.max_version and request.min_version > request.max_version:
        raise InvalidRequest(f"must be at most max_version ({request.max_version})", field=f"{field}.min_version")
    if len(request.client_digest) > MAX_CLIENT_DIGEST:
        raise InvalidRequest(f"must be at most {MAX_CLIENT_DIGEST} bytes", field=f"{field}.client_digest")
    _check_prompt(request, field, context, vocabulary)
    if request.prompt_logprobs is not None:
        _check_scoring(request, request.prompt_logprobs, field)


def _check_scoring(request: RolloutRequest, alternatives: int, field: str) -> None:
    if request.kind is not RolloutKind.REQUEST:
        raise InvalidRequest("only requests are scored; leave it out", field=f"{field}.prompt_logprobs")
    if request.sampling.max_tokens != 1:
        raise InvalidRequest("must be 1 where a prompt is scored", field=f"{field}.sampling.max_tokens")
    check_records(len(request.prompt_ids) // 4, alternatives, field=f"{field}.prompt_logprobs")


def check_order(order: SubmitOrder) -> SubmitOrder:
    for name in ("sequence", "settled", "step", "first_step"):
        if (getattr(order, name) or 0) >= MAX_NUMBER:
            raise InvalidRequest(f"must be below {MAX_NUMBER}", field=name)
    if order.settled > order.sequence:
        raise InvalidRequest(f"must be at most sequence ({order.sequence})", field="settled")
    if order.sequence - order.settled >= MAX_UNSETTLED:
        text = f"more than {MAX_UNSETTLED} submits are not settled; wait for some, or leave sequence and settled out"
        raise InvalidRequest(text, field="settled")
    if order.step is not None and order.step < order.first_step:
        raise InvalidRequest(f"must be at least first_step ({order.first_step})", field="step")
    return order


def _check_prompt(request: RolloutRequest, field: str, context: int, vocabulary: int) -> None:
    ids = unpack_ids(request.prompt_ids, field=f"{field}.prompt_ids")
    if not len(ids):
        raise InvalidRequest("must hold at least one token", field=f"{field}.prompt_ids")
    if context and len(ids) >= context:
        raise InvalidRequest(
            f"{len(ids)} tokens leave no room for a response in the run's context, its max_model_len or the longest "
            f"attached ({context})",
            field=f"{field}.prompt_ids",
        )
    if vocabulary and (largest := int(np.max(ids))) >= vocabulary:
        raise InvalidRequest(
            f"token id {largest} is beyond the engines' vocabulary ({vocabulary}); is it another model's tokenizer?",
            field=f"{field}.prompt_ids",
        )
    longest = min(request.sampling.max_tokens, context or request.sampling.max_tokens)
    if len(request.prompt_ids) + longest * TOKEN_BYTES > _MAX_BYTES:
        raise InvalidRequest("prompt and response would not fit into one message", field=f"{field}.sampling.max_tokens")


def check_trajectory(trajectory: Trajectory, field: str) -> None:
    """Refuse a trajectory whose parts do not fit each other."""
    if len(trajectory.tokens) % TOKEN_BYTES or token_count(trajectory.tokens) != len(trajectory.loss_mask):
        raise InvalidRequest("must have one byte per token of tokens", field=f"{field}.loss_mask")
    if len(trajectory.prompt_ids) % 4:
        raise InvalidRequest("is no run of little-endian u32 token ids", field=f"{field}.prompt_ids")
    end = 0
    for index, one in enumerate(trajectory.responses):
        if not end <= one.start < one.end <= len(trajectory.loss_mask):
            text = "must be a part of tokens, behind the one before it"
            raise InvalidRequest(text, field=f"{field}.responses[{index}]")
        if any(trajectory.loss_mask[end : one.start]):
            raise InvalidRequest("has sampled tokens before it that are in none", field=f"{field}.responses[{index}]")
        end = one.end
    if trajectory.responses and any(trajectory.loss_mask[end:]):
        raise InvalidRequest("lacks the last sampled tokens", field=f"{field}.responses")


def check_number(cursor: str, default: float) -> float:
    """The number that a cursor of a list holds; `default` for an empty one."""
    if cursor and not (cursor.isdecimal() and len(cursor) <= _DIGITS):
        raise InvalidRequest("is none that was given out here; leave it empty to begin", field="cursor")
    return float(cursor or default)


def check_cursor(cursor: str, *, field: str = "cursor") -> str:
    """Check that the cursor is empty, or has the form of those given out here."""
    first, _, second = cursor.partition("-")
    given = first.isdecimal() and second.isdecimal() and len(cursor) <= 41 and max(int(first), int(second)) < 1 << 64
    if cursor and not given:
        raise InvalidRequest("is none that was given out here; leave it empty to begin", field=field)
    return cursor


@contextmanager
def in_doubt(state: CoordinatorState, *refusals: type[EbbtideError]) -> Iterator[None]:
    """Turn a refusal into `StoreUnavailable` while the store may have forgotten what the caller saw stored: workers and
    leases send it again, and then the repeated call succeeds.
    """
    try:
        yield
    except refusals as error:
        if not state.doubtful:
            raise
        raise StoreUnavailable(f"the store came back and may have forgotten something ({error}); ask again") from None
