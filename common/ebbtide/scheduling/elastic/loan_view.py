"""Describes a step under way and the devices that may be lent to it, as window decisions see them."""

from collections.abc import Sequence

from msgspec import Struct

from ebbtide.scheduling.elastic.engine_pace import EnginePace
from ebbtide.scheduling.elastic.group_lengths import GroupLeft


class LendableDevice(Struct, frozen=True, kw_only=True, gc=False):
    """Devices of a trainer that carry one engine. Times in seconds, speeds in units of a typical engine."""

    name: str
    speed: float = 1.0
    on_s: float = 0.0  # from the decision to lend until its engine generates
    off_s: float = 0.0  # from the decision to take it back until the trainer may use it
    busy: bool = True  # its engine has rollouts


class LoanView(Struct, frozen=True, kw_only=True):
    """What is left of a step, and what is there for it."""

    groups: Sequence[GroupLeft]  # not complete
    ready_tokens: int  # of complete groups, prompts included, without those whose gradients were computed
    complete: int  # groups that are complete, with those whose gradients were computed
    remote: float  # speeds of all engines that are not the trainer's, together
    devices: Sequence[LendableDevice]
    batch: float  # the most rollouts that a typical engine runs at once
    kv_tokens: float  # contexts that it has memory for
    pace: EnginePace  # of a typical engine
    read_s: float  # to prefill one token
    weight: float = 1.0  # so many groups does each of `groups` stand for


class LoanPlan(Struct, frozen=True, kw_only=True):
    """When the trainer's devices are taken back, in seconds from the decision; inf: once the last rollout has ended."""

    window_s: float  # until those with rollouts are told to end, the first of them
    return_s: dict[str, float]  # by device: when it is told to end
    end_s: float  # until the step's last gradient is computed
    closed_s: float  # the window by the closed form
    generated_s: float  # until the last rollout ends
    why: str
