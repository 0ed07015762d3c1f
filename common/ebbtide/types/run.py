"""Defines a run as submitted (`RunSpec`), checks it, and defines its present state (`Run`), events and timeline."""

import math
from collections.abc import Iterator
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from ebbtide.errors import InvalidRequest
from ebbtide.types.fleet import EndCause
from ebbtide.types.ids import check_id
from ebbtide.types.weights import PolicyVersion

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]

#: The `trainer.name` of a run whose trainer and driver come from outside the cluster.
EXTERNAL: Final = "external"
#: The `trainer.name` of the built-in trainer.
GRPO: Final = "grpo"
#: vLLM samples at no lower temperature than this, but for 0.
_LEAST_TEMPERATURE: Final = 0.01
#: The `environment.name` of a run whose episodes are sessions that agents play through gateways.
AGENTS: Final = "agents"
#: What comes before the colon in the `environment.name` of a run whose sessions an environment of verifiers plays.
VERIFIERS: Final = "verifiers"
#: Verifiers of one run. The driver loads each in a process.
MAX_VERIFIERS: Final = 32
#: Stop strings and token ids travel with every assignment of a rollout.
MAX_STOPS: Final = 128
MAX_STOP_LENGTH: Final = 128
#: Bytes of a spec as JSON: a message lists several runs.
MAX_SPEC_BYTES: Final = 32 << 10
#: What `trainer.streaming` needs of other fields of `trainer`, and why.
_STREAMED: Final = {
    "minibatches": (1, "all groups of a step are for one update, as they come"),
    "epochs": (1, "another pass would need all groups again, after an update"),
    "kl_coefficient": (0.0, "the KL term is divided by another number of tokens, which needs second gradients"),
}


class TailSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What shortens the tail of a run's steps: the wait for its last responses."""

    #: Queue order. `"lengths"`: one sample of each group first, then those that are forecast to become longest. It
    #: helps with `max_staleness` 0, several samples for each slot, and samples of a prompt that are alike in length.
    #: `"submitted"`: groups start in the order of their submission.
    order: Literal["lengths", "submitted"] = "submitted"
    #: `"grouped"`: workers whose `vllm.speculation` allows it draft tokens from the responses of a rollout's group. No
    #: gain was found on CPU engines, and no GPU was tried: measure it on your model.
    speculation: Literal["grouped", "off"] = "off"
    #: Limit on the reward computation of one response, at most `batch.episode_timeout_s`, which holds without it.
    #: Refused for built-in environments, which run in threads and cannot be cut.
    reward_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    #: `"whole_groups"`: a step trains on the groups that are complete first; the others continue, and are trained on at
    #: most `batch.max_staleness` steps later, which must be at least 1. Generation does not run ahead otherwise.
    rounds: Literal["off", "whole_groups"] = "off"
    #: Groups in flight at the start of a step, as a multiple of `batch.groups_per_step`. More of them make shorter
    #: steps and older tokens.
    rounds_excess: Annotated[float, Meta(ge=1, le=2)] = 2.0


class RunStatus(IntEnum):
    PENDING = 1
    RUNNING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5

    @property
    def ended(self) -> bool:
        return self >= RunStatus.FINISHED


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters, with the fields and bounds of `types.proto`."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0  # the built-in trainer needs at least 0.01
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # nucleus: the share of probability that is sampled from
    top_k: Annotated[int, Meta(ge=0)] = 0  # likeliest tokens that are sampled from; 0 turns it off
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 512  # of one response
    #: At most `max_tokens`. No end token is sampled before; the trainer's probabilities leave end tokens out there,
    #: too.
    min_tokens: Natural = 0
    #: Strings that end a response, matched on decoded text: at most 128, of 1 to 128 characters each.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # token ids that end a response, at most 128
    ignore_eos: bool = False  # continue after the end-of-sequence token
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0  # the built-in trainer needs 1
    presence_penalty: float = 0.0  # refused unless 0: another worker could not continue such a rollout exactly
    frequency_penalty: float = 0.0  # refused unless 0, for the same reason
    seed: int | None = None  # refused, for the same reason
    structured_output: str = ""  # refused, for the same reason
    without_logprobs: bool = False  # refused in a spec, since training needs logprobs; a request may have it
    #: Tokens below this share of the likeliest one's probability are left out; 0 turns it off. Only workers that draft
    #: no tokens take such rollouts.
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0


class EnvironmentSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task of a run's episodes."""

    #: `dataset`, `reasoning_gym`, `number_guessing`, `agents`, `verifiers:TASKSET`, or your `package.module:factory`.
    name: str
    params: dict[str, Any] = {}  # parameters of the environment
    #: Of `agents` alone: a table of names, each with `"package.module:function"`. They give sessions their rewards.
    verifiers: dict[str, str] = {}
    verifier: str = ""  # the verifier of sessions whose end names none


class BatchSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a step, and how far generation may run ahead of training."""

    groups_per_step: Positive = 32  # prompts in an optimiser step
    group_size: Annotated[int, Meta(ge=2, le=4096)] = 8  # samples of each prompt
    #: Versions by which a step's tokens may be older than its weights. 0 is strictly on-policy.
    max_staleness: Natural = 0
    #: What becomes of a group with a failed episode. `"replace"`: the episode is played again, three times in all for
    #: each sample, and then as with `"shrink"`. `"shrink"`: the group is trained with the samples that it has, if there
    #: are at least two. `"drop"`: the group is dropped.
    incomplete_group: Literal["replace", "shrink", "drop"] = "replace"
    #: Limit on an episode's time in environment code. Generation is not counted.
    episode_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    max_turns: Positive = 16  # of an episode
    #: Dynamic sampling (Yu et al., "DAPO", 2025, section 3.2): a group whose rewards are all equal teaches nothing. It
    #: is dropped, and another prompt takes its place, at most so many times; the last one is kept whatever its rewards
    #: are. 0: no group is dropped for its rewards.
    dynamic_sampling: Annotated[int, Meta(ge=0, le=16)] = 0


class TrainerSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer and its hyperparameters."""

    #: `"grpo"` is the built-in trainer, `"package.module:function"` one of yours, and `"external"` says that trainer
    #: and driver come from outside the cluster.
    name: str = GRPO
    steps: Positive = 100  # optimiser steps of the run
    learning_rate: Annotated[float, Meta(gt=0, le=1)] = 1e-6  # of AdamW
    warmup_steps: Natural = 0  # steps over which the learning rate rises linearly
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0  # of AdamW
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0  # norm to which gradients are clipped
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2  # the ratio is clipped from below at `1 - clip_low`
    clip_high: Annotated[float, Meta(gt=0)] = 0.2  # and from above at `1 + clip_high`
    #: Weight of the KL term to the run's `model`. Above 0 a second copy of the network is loaded.
    kl_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    importance_cap: Annotated[float, Meta(gt=0)] = 2.0  # upper bound of a stale token's importance weight
    minibatches: Positive = 1  # updates in a pass over a step's samples
    epochs: Positive = 1  # passes over a step's samples
    micro_batch_tokens: Positive = 16384  # tokens in one forward pass; those of padding count, without `packing`
    normalize_std: bool = True  # divide advantages by the group's standard deviation
    #: Of computation and published weights; master weights and optimiser state stay float32. `"auto"`: bfloat16 on GPUs
    #: that compute in it, float32 elsewhere. Set it if the run's trainer may move between a CPU and a GPU.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    checkpoint_every: Positive = 10  # steps between checkpoints; the last step always has one
    permute_rewards: bool = False  # control experiment: rewards are permuted inside each group
    #: Compute gradients on each group as it becomes complete, with one update at the end of the step. Needs
    #: `minibatches` and `epochs` 1 and `kl_coefficient` 0.
    streaming: bool = False
    #: With `streaming` and a trainer that lends its device: spot workers that make the steps no shorter are asked to
    #: hand over and leave, at most one before each step, and none while other runs are live.
    releases: bool = False
    #: Of the learning rate after the warm-up: it stays, or falls to 0 at the end of `steps`, linearly or by a cosine.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    #: Keep only what enters each layer, and compute its activations again in the backward pass: about a third more
    #: computation, and much longer micro-batches. Not set: on GPUs.
    gradient_checkpointing: bool | None = None
    #: Put the samples of a micro-batch behind one another into one row, in place of padding; attention stays within
    #: each sample. Not set: on GPUs in bfloat16, for networks that allow it. On CPUs short samples are faster padded.
    packing: bool | None = None
    #: Weigh tokens of the trainer's own version, too, by how much likelier the trainer finds them than the engine did,
    #: at most `importance_cap`, and take their ratio to the trainer's logprobs from before the step (Yao et al., "Your
    #: Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025). Off: their ratio is taken to the
    #: engine's logprobs, and clipping alone bounds the mismatch. Off is the default because it costs no forward pass
    #: with several updates, and is what all measured runs had. Turn it on if `logprob_gap_p99` of the `step` events
    #: comes near ln(1 + `clip_high`): mismatch alone clips tokens then.
    truncated_importance_sampling: bool = False


class SlotPriority(StrEnum):
    """Who gets free slots while rollouts of another kind wait, too."""

    BEFORE = "before"
    SHARED = "shared"
    BACKGROUND = "background"

    @classmethod
    def _missing_(cls, value: object) -> "SlotPriority | None":
        """Reads the former words of specs that a store has had since before an upgrade; a spec's file may not use
        them."""
        return {"beside": cls.SHARED, "behind": cls.BACKGROUND}.get(str(value))


class EvaluationSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evaluation on problems that are never trained on."""

    problems: Natural = 0  # problems of each evaluation; 0: no evaluation
    #: Steps between evaluations, besides those before the first and after the last step. 0: only these two.
    every: Natural = 0
    #: Evaluation's share of the free slots while training waits, too: 3 of 4, 1 of 2, or 1 of 8. Either kind takes
    #: slots that the other does not use.
    priority: SlotPriority = SlotPriority.BEFORE


class BorrowSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the run may take of borrowed workers."""

    #: The run's rollouts on borrowed workers at once. 0: none; not set: no limit.
    max_rollouts: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None


class ShareSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run's share of a fleet that other runs use, too."""

    # Sums of floats are exact enough within these bounds.
    weight: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0  # relative to the other runs of the same `priority`
    #: Share of the whole fleet that the run has while it has work. The floors of all live runs add up to 1 at most.
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.0
    #: Share that the run never exceeds, even when the rest is idle. Not set: no limit.
    ceiling: Annotated[float, Meta(gt=0, le=1)] | None = None
    priority: Annotated[int, Meta(ge=-10, le=10)] = 0  # higher ones go first, except for the floors of others


class RequestSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the requests of gateways' clients get of a run."""

    #: Requests' share of the free slots while other rollouts wait, too: 3 of 4, 1 of 2, or 1 of 8.
    priority: SlotPriority = SlotPriority.BEFORE


class SharingSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the run's trainer has its devices alone."""

    #: `"turns"`: trainers of several runs take turns on them. The run has them for each step once its groups are there;
    #: in between its trainer's state lies in host memory, or on disk. Needs the built-in trainer with `turns`, and a
    #: serving-guard with `owner = "turns"`.
    devices: Literal["own", "turns"] = "own"


class RunSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run as submitted."""

    name: str  # at most 100 characters of `A-Z a-z 0-9 . _ -`
    #: Directory of a Hugging Face checkpoint (safetensors and tokenizer), which trainer and driver read at this path;
    #: or a name on the Hub (`Qwen/Qwen3-8B`), which they look up in their caches (`HF_HOME`), and else fetch.
    model: str
    policy: str = "policy"  # name of the weight stream that the run trains
    seed: Natural = 0  # of problems and of the order of samples
    environment: EnvironmentSpec
    sampling: Sampling = Sampling()
    batch: BatchSpec = BatchSpec()
    trainer: TrainerSpec = TrainerSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    output: str = "runs"  # directory on the trainer's machine; checkpoints go to `OUTPUT/RUN/checkpoints`
    #: Limit on the run's data in the store: prompts, 12 bytes for each token, trajectories, events, timeline, and ids
    #: that are over.
    quota_bytes: Annotated[int, Meta(ge=1 << 20)] = 256 << 20
    borrow: BorrowSpec = BorrowSpec()
    share: ShareSpec = ShareSpec()
    requests: RequestSpec = RequestSpec()
    tail: TailSpec = TailSpec()
    #: Prompt plus response, in tokens, at which a response ends on any worker. 0: the longest context that a worker of
    #: the run has had since the coordinator started; a warning says when a longer one comes. Set it where workers'
    #: contexts differ and the longest may come last: longer rollouts then wait for such a worker instead of ending as
    #: dead letters after 30 s.
    max_model_len: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    sharing: SharingSpec = SharingSpec()

    @property
    def takes_turns(self) -> bool:
        """Whether its trainer shares its devices with those of other runs."""
        return self.sharing.devices == "turns"

    @property
    def external(self) -> bool:
        """Whether trainer and driver come from outside: then only claims by run id get its leases."""
        return self.trainer.name == EXTERNAL

    @property
    def built_in(self) -> bool:
        """Whether the built-in learner trains it."""
        return self.trainer.name == GRPO

    @property
    def from_agents(self) -> bool:
        """Whether its episodes are sessions of gateways' clients, and not played by a driver."""
        return self.environment.name == AGENTS or self.environment.name.startswith(f"{VERIFIERS}:")


class RunShare(Struct, frozen=True, kw_only=True):
    """A live run's part of the fleet."""

    lately: float = 0.0  # its share of the tokens made within the last minute or so
    due: float = 0.0  # the share that it is due now
    workers: int = 0  # the number of workers that it should have


class LongRollout(Struct, frozen=True, kw_only=True):
    """A running rollout that may end last. In tokens."""

    rollout_id: str
    stored: int = 0
    expected_tokens: int = 0  # still to come, on average
    longest_tokens: int = 0  # that are not exceeded with a probability of 0.8


class RunOutlook(Struct, frozen=True, kw_only=True):
    """Forecasts of what a run's open training rollouts have still to come."""

    half_s: float = 0.0  # all have ended by then with a probability of one half; 0: no speed is known
    ninth_s: float = 0.0  # with nine tenths
    tail: float = 0.0  # share of `half_s` in which none waits for a worker
    longest: tuple[LongRollout, ...] = ()
    intraclass_correlation: float = (
        0.0  # share of the lengths' variance that the samples of a group have in common, as learnt
    )
    forecast: int = 0  # responses that ended, and whose length had been forecast at their start
    covered: int = 0  # of these, within the interval that four in five are to be in


class RunMoves(Struct, frozen=True, kw_only=True):
    """Running rollouts of a live run that were moved so that the step ends sooner, since the coordinator leads."""

    moves: int = 0
    finished: int = 0  # rollouts that ended meanwhile
    judged: int = 0  # of these: had time to pay back, and their rollout still ran there
    promised_tokens: float = 0.0  # that those should have made until then
    made_tokens: float = 0.0  # that they made
    stopped: bool = False  # recent ones made too little of what they promised: but for one a minute, none is made


class Run(Struct, frozen=True, kw_only=True):
    run_id: str
    spec: RunSpec
    status: RunStatus = RunStatus.PENDING
    message: str = ""
    age_s: float = 0.0
    newest: PolicyVersion | None = None
    counters: dict[str, int] = {}
    dropped: dict[str, int] = {}
    holders: dict[str, str] = {}
    share: RunShare | None = None
    submitter: str = ""  # the name in the token of who submitted it
    outlook: RunOutlook | None = None
    moves: RunMoves | None = None


class WorkerChange(StrEnum):
    """What happened to a worker, as the label `state` of an event of kind "worker" says."""

    ATTACHED = "attached"
    QUARANTINED = "quarantined"  # it attached, and gets no work for a while
    DRAINING = "draining"
    LEFT = "left"  # it had handed everything over
    LOST = "lost"
    SUSPECTED = "suspected"
    CHANGED = "changed"  # its engine was restarted
    WENT_OVER = "went_over"  # to another run
    BORROWED = "borrowed"  # its host is borrowed again
    GIVEN_UP = "given_up"  # its host is not borrowed now

    @classmethod
    def _missing_(cls, value: object) -> "WorkerChange | None":
        """Reads the former word for `QUARANTINED`: a store keeps a run's events longer than a coordinator lives, so
        those that it wrote before its upgrade still have it."""
        return cls.QUARANTINED if value == "shunned" else None


class RunEvent(Struct, frozen=True, kw_only=True):
    kind: str
    cursor: str = ""
    key: str = ""
    message: str = ""
    values: dict[str, float] = {}
    labels: dict[str, str] = {}
    age_s: float = 0.0

    @property
    def worker_change(self) -> WorkerChange | None:
        """What happened to the worker of the label `worker`; None: another kind of event, or a change of a later
        revision."""
        if self.kind != "worker" or "worker" not in self.labels:
            return None
        try:
            return WorkerChange(self.labels.get("state", ""))
        except ValueError:
            return None


class AttemptSpan(Struct, frozen=True, kw_only=True):
    """One ended attempt, which made the tokens [first, last). Times are seconds since the run's submission."""

    cursor: str
    rollout_id: str
    attempt_id: str
    worker_id: str
    first: int
    last: int
    begin_s: float
    end_s: float
    end: str  # in words, for people
    first_version: int = 0
    last_version: int = 0
    cause: int = EndCause.NOT_STATED  # an `EndCause`; one of a later release counts as NOT_STATED
    # Of its rollout, as submitted.
    group_id: str = ""
    episode_id: str = ""
    turn: int = 0
    evaluation: bool = False
    prompt_tokens: int = 0
    step: int | None = None  # that it was submitted for
    request: bool = False  # of a gateway's client

    def __post_init__(self) -> None:
        force_setattr(self, "cause", EndCause(self.cause) if self.cause in set(EndCause) else EndCause.NOT_STATED)

    @property
    def finished(self) -> bool:
        return self.cause is EndCause.FINISHED


class LeaseRef(Struct, frozen=True):
    run_id: str
    role: str
    fence: str
    number: int = 0  # counts the claims of the role, so a newer lease has a higher one; 0: not counted


#: Roles with one holder each, without which a run does not go on.
ROLES = ("trainer", "driver")
#: The role of which each holder has a lease of its own, under `gateway_role`.
GATEWAY: Final = "gateway"


def gateway_role(holder: str) -> str:
    """The role in the reference of a gateway's lease."""
    return f"{GATEWAY}/{holder}"


def is_gateway(role: str) -> bool:
    """Whether a lease of this role is a gateway's."""
    return role.startswith(f"{GATEWAY}/")


def check_spec(spec: RunSpec) -> RunSpec:
    """Check what field bounds cannot express. Raises `InvalidRequest` naming the first wrong field."""
    for problem in spec_problems(spec):
        raise problem
    return spec


def spec_problems(spec: RunSpec) -> Iterator[InvalidRequest]:
    """Yield all that field bounds cannot express, each problem with its field."""
    for name in ("name", "policy"):
        yield from _id_problems(getattr(spec, name), name)
    if len(spec.name) > 100:
        yield InvalidRequest("at most 100 characters, so that ids fit", field="name")
    yield from _sampling_problems(spec.sampling, "sampling")
    if spec.sampling.without_logprobs:
        yield InvalidRequest(
            "a run's rollouts are trained on by their logprobs; leave it out", field="sampling.without_logprobs"
        )
    for name in ("trainer", "batch", "share", "tail"):
        yield from _infinite(to_mapping(getattr(spec, name)), name)
    yield from _infinite(spec.environment.params, "environment.params")
    if spec.from_agents:
        yield from _agents_problems(spec)
    yield from _verifiers_problems(spec)
    if spec.trainer.streaming:
        yield from _streaming_problems(spec.trainer)
    elif spec.trainer.releases:
        text = "needs trainer.streaming: the end of other steps is not planned; set that, or leave this out"
        yield InvalidRequest(text, field="trainer.releases")
    yield from _reward_limit_problems(spec)
    yield from _rounds_problems(spec)
    yield from _draws_problems(spec)
    yield from _sharing_problems(spec)
    if len(msgspec.json.encode(spec)) > MAX_SPEC_BYTES:
        yield InvalidRequest(f"more than {MAX_SPEC_BYTES} bytes in all; put data into files", field=_longest(spec))


def _id_problems(value: str, field: str) -> Iterator[InvalidRequest]:
    try:
        check_id(value, field=field)
    except InvalidRequest as problem:
        yield problem


def _rounds_problems(spec: RunSpec) -> Iterator[InvalidRequest]:
    """Refuse rounds where no driver decides on groups, or where none may be trained after its step."""
    if spec.tail.rounds == "off":
        return
    if spec.from_agents or spec.external:
        yield InvalidRequest("only a run with a driver of its own has rounds; leave it out", field="tail.rounds")
    if spec.batch.max_staleness < 1:
        text = (
            "must be at least 1 with tail.rounds: groups that continue are trained later; raise it, or leave that out"
        )
        yield InvalidRequest(text, field="batch.max_staleness")


def _draws_problems(spec: RunSpec) -> Iterator[InvalidRequest]:
    """Refuse other prompts where no driver draws them."""
    if spec.batch.dynamic_sampling and (spec.from_agents or spec.external):
        text = "only a run with a driver of its own draws prompts; leave it out"
        yield InvalidRequest(text, field="batch.dynamic_sampling")


def _sharing_problems(spec: RunSpec) -> Iterator[InvalidRequest]:
    if spec.takes_turns and not spec.built_in:
        text = f'only the built-in trainer takes turns; leave it out, or set trainer.name = "{GRPO}"'
        yield InvalidRequest(text, field="sharing.devices")
    if spec.share.ceiling is not None and spec.share.floor > spec.share.ceiling:
        yield InvalidRequest(f"must be at most share.ceiling ({spec.share.ceiling:g})", field="share.floor")


def _agents_problems(spec: RunSpec) -> Iterator[InvalidRequest]:
    """Refuse what needs problems of the run's own."""
    if spec.environment.params and spec.environment.name == AGENTS:
        yield InvalidRequest("an environment of agents has none; leave them out", field="environment.params")
    if spec.evaluation.problems:
        yield InvalidRequest("a run of agents has no problems to evaluate; leave it out", field="evaluation.problems")


def _verifiers_problems(spec: RunSpec) -> Iterator[InvalidRequest]:
    environment = spec.environment
    if (environment.verifiers or environment.verifier) and not spec.from_agents:
        text = (
            f'only sessions of agents have verifiers (environment.name = "{AGENTS}"); an environment gives its rewards'
        )
        yield InvalidRequest(text, field="environment.verifiers")
    if len(environment.verifiers) > MAX_VERIFIERS:
        yield InvalidRequest(f"at most {MAX_VERIFIERS}", field="environment.verifiers")
    for name, verifier in environment.verifiers.items():
        yield from _id_problems(name, "environment.verifiers")
        if not all(part.strip() for part in verifier.partition(":")):
            text = f"{verifier!r} is no verifier; give package.module:function"
            yield InvalidRequest(text, field=f"environment.verifiers.{name}")
    if environment.verifier and environment.verifier not in environment.verifiers:
        known = ", ".join(sorted(environment.verifiers)) or "none"
        yield InvalidRequest(f"must be one of environment.verifiers ({known})", field="environment.verifier")


def _streaming_problems(trainer: TrainerSpec) -> Iterator[InvalidRequest]:
    for name, (wanted, reason) in _STREAMED.items():
        if getattr(trainer, name) != wanted:
            text = f"must be {wanted:g} with trainer.streaming: {reason}; change it, or leave trainer.streaming out"
            yield InvalidRequest(text, field=f"trainer.{name}")


def _reward_limit_problems(spec: RunSpec) -> Iterator[InvalidRequest]:
    limit_s, most_s = spec.tail.reward_timeout_s, spec.batch.episode_timeout_s
    if limit_s is not None and limit_s > most_s:
        text = f"must be at most batch.episode_timeout_s ({most_s:g}); lower it, or raise that"
        yield InvalidRequest(text, field="tail.reward_timeout_s")
    if spec.from_agents and limit_s is not None:
        text = "verifiers of agents' sessions are limited by batch.episode_timeout_s; leave it out"
        yield InvalidRequest(text, field="tail.reward_timeout_s")


def _infinite(value: Any, field: str) -> Iterator[InvalidRequest]:
    """Refuse infinities and NaN, which pass field bounds but do not exist in JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        yield InvalidRequest("must be finite", field=field)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _infinite(inner, f"{field}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _infinite(inner, f"{field}[{index}]")


def _longest(spec: RunSpec) -> str:
    return max(spec.__struct_fields__, key=lambda name: len(msgspec.json.encode(getattr(spec, name))))


def check_sampling(sampling: Sampling, *, field: str) -> Sampling:
    """Refuse non-finite values, and parameters under which a rollout cannot resume exactly. Raises `InvalidRequest`
    naming the first wrong field.

    A repetition penalty is allowed: it counts prompt and response alike, so stored tokens in the prompt weigh the same.
    Presence and frequency penalties count the response alone; a seeded generator and a grammar have hidden state.
    """
    for problem in _sampling_problems(sampling, field):
        raise problem
    return sampling


def _sampling_problems(sampling: Sampling, field: str) -> Iterator[InvalidRequest]:
    yield from _infinite(to_mapping(sampling), field)
    for name in ("presence_penalty", "frequency_penalty", "seed", "structured_output"):
        if (value := getattr(sampling, name)) is not None and (value or name == "seed"):
            yield InvalidRequest(
                "not supported: a rollout resumed on another worker could not continue it exactly; leave it out",
                field=f"{field}.{name}",
            )
    if sampling.min_tokens > sampling.max_tokens:
        yield InvalidRequest(f"must be at most max_tokens ({sampling.max_tokens})", field=f"{field}.min_tokens")
    if any(not 1 <= len(text) <= MAX_STOP_LENGTH for text in sampling.stop):
        yield InvalidRequest(f"a stop string has 1 to {MAX_STOP_LENGTH} characters", field=f"{field}.stop")
    for name in ("stop", "stop_token_ids"):
        if len(getattr(sampling, name)) > MAX_STOPS:
            yield InvalidRequest(f"at most {MAX_STOPS}", field=f"{field}.{name}")
    if any(not 0 <= token < 1 << 32 for token in sampling.stop_token_ids):
        yield InvalidRequest("token ids are unsigned 32-bit", field=f"{field}.stop_token_ids")


def check_learnable(sampling: Sampling, *, field: str = "") -> None:
    """Refuse sampling whose logprobs the built-in learner cannot compute again. `field`: what the parameters are in."""
    place = f"{field}." if field else ""
    if sampling.temperature == 0:
        raise InvalidRequest("must be above 0: greedy responses cannot be trained on", field=f"{place}temperature")
    if sampling.temperature < _LEAST_TEMPERATURE:
        text = f"must be at least {_LEAST_TEMPERATURE:g}, the lowest that engines sample at"
        raise InvalidRequest(text, field=f"{place}temperature")
    if sampling.repetition_penalty != 1:
        text = "must be 1: the trainer does not apply penalties"
        raise InvalidRequest(text, field=f"{place}repetition_penalty")


def to_mapping(record: Struct) -> dict[str, Any]:
    """The record as plain builtins, for JSON and TOML."""
    built: dict[str, Any] = msgspec.to_builtins(record)
    return built
