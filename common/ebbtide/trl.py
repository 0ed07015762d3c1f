"""Generates the rollouts of TRL's `GRPOTrainer` on Ebbtide's workers.

    with EbbtideRollouts() as rollouts:
        trainer = GRPOTrainer(..., args=GRPOConfig(...), rollout_func=rollouts)
        trainer.train()

Each generation publishes the model's weights if an optimiser step has changed them, and has every completion sampled by
that version alone. A completion whose worker dies resumes on another one. TRL and torch are not imported: all that is
needed of them comes with the trainer. Written against TRL 1.16, whose `rollout_func` gets each prompt once for each of
its completions.

Invariant: rollouts of a generation count as trained once TRL asks for the next one, or at the end; until then the store
keeps them. Only the main process of several ranks has a run. If it dies the run is over: what TRL saved as a checkpoint
begins a new run.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from numbers import Real
from types import TracebackType
from typing import Any, Final, Self

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.client import Client
from ebbtide.client.lease import Lease
from ebbtide.client.sync_client import LoopThread
from ebbtide.errors import EbbtideError, InvalidRequest, LeaseSuperseded, NotReady, Unavailable
from ebbtide.types.rollout import DropReason, FinishedRollout, FinishReason, RolloutKind, RolloutRequest
from ebbtide.types.run import EXTERNAL, Run, RunEvent, RunStatus, Sampling, check_sampling
from ebbtide.types.tokens import pack_ids, unpack_tokens

#: How often a completion is begun anew that ended as a dead letter, as for a run with a driver of its own.
_ATTEMPTS: Final = 3
#: Keys of `GRPOConfig.generation_kwargs` that engines know under the same name.
_GENERATION: Final = frozenset({"stop", "stop_token_ids", "min_tokens", "ignore_eos"})
#: Seconds that the end of a run may take after training.
_END_S: Final = 120.0


class Generation(Struct, frozen=True, kw_only=True):
    """What one call of `rollout_func` asks for: a completion of each prompt, in order."""

    prompts: list[list[int]]  # token ids
    group_size: int  # neighbours that complete the same prompt
    step: int  # optimiser steps so far
    sampling: Sampling
    evaluation: bool = False


class EbbtideRollouts:
    """A `rollout_func`. Use it in a `with` block, whose end ends the run.

    Besides what TRL requires, it returns `rollout_id` and `weight_version` of each completion, which reward functions
    get. The run appears with the first generation; `run` is None before. `reward` and whatever else TRL logs is
    reported as the run's `step` events.
    """

    def __init__(
        self,
        spec: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        coordinator: str | None = None,
        relay: str | None = None,
        token: str | None = None,
        tls_ca: str | None = None,
        security: ClientSecurity | None = None,
        patience_s: float = 60.0,
        stall_s: float = 600.0,
        correct_mismatch: bool = False,
    ) -> None:
        """`spec`: keys of the run's spec, such as `name` or `share`, beside those that follow from the trainer.
        `run_id` must be a new one. The other arguments up to `patience_s` are those of `Client`.

        `stall_s`: seconds without any finished rollout after which a generation gives up.

        `correct_mismatch`: TRL weighs tokens by how much likelier its own network finds them than the engine did, as it
        does with `use_vllm` (`vllm_importance_sampling_correction` and its settings in `GRPOConfig`). Without it TRL
        leaves the engine's logprobs aside.
        """
        self._spec = dict(spec or {})
        self._run_id = run_id
        self._connection: dict[str, Any] = {
            "coordinator": coordinator,
            "relay": relay,
            "token": token,
            "tls_ca": tls_ca,
            "security": security,
            "patience_s": patience_s,
        }
        self._stall_s = stall_s
        self._corrects = correct_mismatch
        self._published_step: int | None = None  # whose weights the run has; every rank knows
        self._logged = 0  # entries of TRL's log that were reported
        self._loop: LoopThread | None = None
        self._trained: _TrainedRun | None = None
        self._state: Any = None  # the trainer's, for what it logs after the last generation
        self._closed = False

    @property
    def run(self) -> Run | None:
        """The run, on the main process, as it was last known."""
        return self._trained.lease.run if self._trained is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.close(RunStatus.FAILED, f"{type(error).__name__}: {error}"[:500])

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Complete each prompt once. Raises `InvalidRequest` naming a setting of the trainer that cannot be served,
        `Unavailable` if a service or the workers are away for too long, `LeaseSuperseded` if the run was ended."""
        _check_trainer(trainer)
        if self._closed:
            raise NotReady("the run has ended with its block; make another EbbtideRollouts for a further training")
        accelerator = trainer.accelerator
        ranks = _Ranks(accelerator.num_processes, accelerator.process_index)
        weights, step = None, int(trainer.state.global_step)
        if self._published_step != step:
            weights = unique_tensors(accelerator.get_state_dict(trainer.model_wrapped))  # all ranks take part
        everyones = ranks.gathered(prompts)
        made: dict[str, list[Any]] | EbbtideError | None = None
        if accelerator.is_main_process:
            try:
                made = self._generated(_generation(everyones, trainer), weights, trainer)
            except EbbtideError as error:
                if ranks.count == 1:
                    raise
                made = error  # to all ranks, which would wait for it otherwise
        answer = ranks.shared(made)
        if isinstance(answer, EbbtideError):
            raise answer
        self._published_step = step
        assert answer is not None  # noqa: S101 - the main process sent it
        if self._corrects:
            _correct_mismatch(trainer)
        mine = slice(ranks.index * len(prompts), (ranks.index + 1) * len(prompts))
        return {name: values[mine] for name, values in answer.items()}

    def close(self, status: RunStatus = RunStatus.FINISHED, message: str = "") -> None:
        """End the run as `FINISHED` or `FAILED`; the rollouts of the last generation count as trained or as dropped. A
        repeat does nothing. Raises what the coordinator answers, but for a run that failed already."""
        if self._closed:
            return
        self._closed = True
        loop, trained, self._loop = self._loop, self._trained, None
        if loop is None:
            return
        try:
            if trained is not None:
                loop.call(trained.end(status, message, self._unreported()))
        finally:
            loop.close()

    def _generated(self, asked: Generation, weights: Any, trainer: Any) -> dict[str, list[Any]]:
        if self._loop is None:
            self._loop = LoopThread()
        if self._trained is None:
            spec = run_spec(self._spec, asked, trainer)
            self._trained = self._loop.call(_TrainedRun.begin(self._connection, spec, self._run_id, self._stall_s))
        self._state = trainer.state
        return self._loop.call(self._trained.generate(asked, weights, self._unreported()))

    def _unreported(self) -> list[RunEvent]:
        entries = list(self._state.log_history) if self._state is not None else []
        events = [step_event(entry) for entry in entries[self._logged :]]
        self._logged = len(entries)
        return [event for event in events if event is not None]


def run_spec(given: Mapping[str, Any], asked: Generation, trainer: Any) -> dict[str, Any]:
    """The spec of a trainer's run: `given`, and what follows from the trainer where that says nothing. Raises
    `InvalidRequest` naming a key that is not for others to set."""
    if "sampling" in given:
        raise InvalidRequest("GRPOConfig has the sampling: set it there, and leave this out", field="spec.sampling")
    arguments = trainer.args
    made = {"name": EXTERNAL, "steps": max(1, int(trainer.state.max_steps)), "learning_rate": arguments.learning_rate}
    groups = max(1, len(asked.prompts) // asked.group_size)
    return {
        "name": "trl",
        "model": str(trainer.model.config.name_or_path or "model"),
        "environment": {"name": "trl"},  # a name for people: TRL has prompts and rewards
        "batch": {"groups_per_step": groups, "group_size": max(2, int(trainer.num_generations))},
        **given,
        "sampling": asked.sampling,
        "trainer": {name: value for name, value in made.items() if name != "learning_rate" or 0 < value <= 1},
    }


def unique_tensors(tensors: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each of a model's tensors under its first name: tied ones have several."""
    found: dict[tuple[Any, ...], tuple[str, Any]] = {}
    for name, tensor in tensors.items():
        found.setdefault((tensor.data_ptr(), tuple(tensor.shape)), (name, tensor))
    return list(found.values())


def step_event(entry: Mapping[str, Any]) -> RunEvent | None:
    """What TRL logged after a step, as an event of the run; None for what tells of no step's reward."""
    numbers = {name: float(value) for name, value in entry.items() if isinstance(value, Real)}
    values = {name: value for name, value in numbers.items() if math.isfinite(value)}
    if not values.keys() >= {"reward", "step"}:
        return None
    step = int(values["step"])
    return RunEvent(kind="step", key=str(step), message=f"step {step}: reward {values['reward']:.3f}", values=values)


class _TrainedRun:
    """The run, under its lease. All calls are made in one event loop."""

    def __init__(self, client: Client, lease: Lease, stall_s: float) -> None:
        self._client = client
        self.lease = lease
        self._finished: AsyncGenerator[FinishedRollout, None] = lease.finished()
        self._stall_s = stall_s
        self._version = 0
        self._calls = count()
        self._open: set[str] = set()  # submitted, and not acknowledged
        self._untrained: list[str] = []  # of the last generation for training

    @classmethod
    async def begin(
        cls, connection: Mapping[str, Any], spec: Mapping[str, Any], run_id: str | None, stall_s: float
    ) -> Self:
        client = Client(**connection)
        try:
            run = await client.submit(spec, run_id)
            return cls(client, await client.acquire(run.run_id), stall_s)
        except BaseException:
            await client.close()
            raise

    async def generate(self, asked: Generation, weights: Any, events: Sequence[RunEvent]) -> dict[str, list[Any]]:
        """`weights`: those of `asked.step`, if they are new."""
        if not asked.evaluation:
            await self._acknowledge(self._untrained)  # that TRL asks for more says that it has trained on them
            self._untrained = []
        await self.lease.report(events)
        if weights is not None:
            self._version = (await self.lease.publish(weights, step=asked.step, parent=self._version)).version
        requests = self._requests(asked, next(self._calls))
        rollouts = await self._completed(requests, asked.step)
        names = [rollout.rollout_id for rollout in rollouts]
        if asked.evaluation:
            await self._acknowledge(names)
        else:
            self._untrained = names
        return _answer(asked, rollouts)

    async def end(self, status: RunStatus, message: str, events: Sequence[RunEvent]) -> None:
        try:
            async with asyncio.timeout(_END_S):
                if status is RunStatus.FINISHED:
                    await self._acknowledge(self._untrained)
                    await self.lease.cancel_rollouts(self._open, DropReason.RUN_ENDED)  # of a generation that failed
                    await self.lease.report(events)
                    await self.lease.finish(status, message)
                else:
                    with suppress(EbbtideError):  # the caller has an error already, and another one would hide it
                        await self.lease.cancel_rollouts(self._open, DropReason.RUN_ENDED)
                        await self.lease.finish(status, message)
        finally:
            await self._finished.aclose()
            await self.lease.release()
            await self._client.close()

    def _requests(self, asked: Generation, call: int) -> list[RolloutRequest]:
        groups = [f"s{asked.step}.c{call}.g{number // asked.group_size}" for number in range(len(asked.prompts))]
        return [
            RolloutRequest(
                rollout_id=f"{group}.{number % asked.group_size}",
                group_id=group,
                episode_id=f"{group}.{number % asked.group_size}",
                prompt_ids=pack_ids(prompt),
                sampling=asked.sampling,
                kind=RolloutKind.EVAL if asked.evaluation else RolloutKind.TRAIN,
                min_version=self._version,
                max_version=self._version,
            )
            for number, (group, prompt) in enumerate(zip(groups, asked.prompts, strict=True))
        ]

    async def _completed(self, requests: Sequence[RolloutRequest], step: int) -> list[FinishedRollout]:
        """A rollout for each request, in order. One that ends as a dead letter is asked for again under another id."""
        wanted = {request.rollout_id: (number, 1) for number, request in enumerate(requests)}  # place, attempt
        found: dict[int, FinishedRollout] = {}
        await self._submit(requests, step)
        while len(found) < len(requests):
            rollout = await self._next(len(requests) - len(found))
            if rollout.rollout_id not in wanted:  # a reconnect repeats some
                continue
            place, attempt = wanted.pop(rollout.rollout_id)
            if rollout.reason is not FinishReason.DEAD_LETTERED:
                found[place] = rollout
                continue
            await self._acknowledge([rollout.rollout_id], DropReason.DEAD_LETTERED)
            if attempt == _ATTEMPTS:
                raise Unavailable(f"a completion failed {attempt} times, at last so: {rollout.message}")
            again = replace(requests[place], rollout_id=f"{requests[place].rollout_id}.again{attempt}")
            wanted[again.rollout_id] = place, attempt + 1
            await self._submit([again], step)
        return [found[place] for place in range(len(requests))]

    async def _submit(self, requests: Sequence[RolloutRequest], step: int) -> None:
        self._open.update(request.rollout_id for request in requests)
        try:
            async with asyncio.timeout(self._stall_s):
                await self.lease.submit_rollouts(requests, step=step, first_step=step)
        except TimeoutError:
            raise Unavailable(
                f"the coordinator had no room for {len(requests)} rollouts for {self._stall_s:g} s: generate fewer at "
                "once, or give the run more quota_bytes"
            ) from None

    async def _next(self, missing: int) -> FinishedRollout:
        try:
            async with asyncio.timeout(self._stall_s):
                rollout = await anext(self._finished, None)
            if rollout is not None:
                return rollout
            status = (await self._client.run(self.lease.run_id)).status.name.lower()
            raise LeaseSuperseded(f"run {self.lease.run_id} is {status}, and nobody generates for it any more")
        except TimeoutError:
            self._finished = self.lease.finished()  # the other one ended with its wait
            workers = len(await self._client.workers())
        raise Unavailable(
            f"no rollout ended for {self._stall_s:g} s, and {missing} are missing; {workers} workers are attached: "
            f"start some that serve {self.lease.run.spec.model}, or raise stall_s"
        )

    async def _acknowledge(self, names: Iterable[str], drop_reason: str = "") -> None:
        names = list(names)
        await self.lease.acknowledge(names, drop_reason)
        self._open.difference_update(names)


class _Ranks(Struct, frozen=True):
    """The processes of the trainer. Each has as many prompts, and TRL's groups may reach over several."""

    count: int
    index: int

    def gathered(self, prompts: list[Any]) -> list[Any]:
        if self.count == 1:
            return prompts
        from accelerate.utils import gather_object

        return list(gather_object(prompts))

    def shared(self, value: Any) -> Any:
        """What the main process has."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        (shared,) = broadcast_object_list([value], from_process=0)
        return shared


def _generation(prompts: list[Any], trainer: Any) -> Generation:
    evaluation = not trainer.model.training
    return Generation(
        prompts=_prompt_ids(prompts, trainer),
        group_size=int(trainer.num_generations_eval if evaluation else trainer.num_generations),
        step=int(trainer.state.global_step),
        sampling=sampling_of(trainer.args, trainer.eos_token_ids),
        evaluation=evaluation,
    )


def sampling_of(arguments: Any, end_token_ids: Sequence[int]) -> Sampling:
    """The sampling of a `GRPOConfig`. Raises `InvalidRequest` naming a setting that engines do not have here."""
    further = dict(arguments.generation_kwargs or {})
    if unknown := sorted(further.keys() - _GENERATION):
        known = ", ".join(sorted(_GENERATION))
        text = f"is not known here; only {known} are, so leave it out"
        raise InvalidRequest(text, field=f"generation_kwargs.{unknown[0]}")
    stop, ends = further.get("stop", ()), () if further.get("ignore_eos") else end_token_ids
    return check_sampling(
        Sampling(
            temperature=float(arguments.temperature),
            top_p=float(arguments.top_p),
            top_k=int(arguments.top_k or 0),
            min_p=float(arguments.min_p or 0.0),
            repetition_penalty=float(arguments.repetition_penalty),
            max_tokens=int(arguments.max_completion_length),
            min_tokens=int(further.get("min_tokens", 0)),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(dict.fromkeys([*ends, *further.get("stop_token_ids", ())])),
            ignore_eos=bool(further.get("ignore_eos", False)),
        ),
        field="GRPOConfig",
    )


def _check_trainer(trainer: Any) -> None:
    """Raise `InvalidRequest` for what would be sampled elsewhere, or from other weights."""
    for field, name in {"tools": "tools", "environment_factory": "environment_factories"}.items():
        if getattr(trainer, name, None):
            text = "TRL samples what follows a tool call without rollout_func; play several turns through a gateway"
            raise InvalidRequest(text, field=field)
    if trainer.args.use_vllm:
        text = "starts an engine of TRL's own, which nobody would ask; leave it out (see correct_mismatch)"
        raise InvalidRequest(text, field="use_vllm")
    if hasattr(trainer.model, "peft_config"):
        raise InvalidRequest("adapters are not published; train all weights", field="peft_config")


def _prompt_ids(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """As TRL encodes prompts itself: texts, or conversations by the chat template."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        encoded = tokenizer(text=prompts)
    else:
        parts = [part for prompt in prompts for message in prompt for part in _parts(message)]
        if any(part.get("type") != "text" for part in parts):
            raise InvalidRequest("has images or the like; the workers take text only", field="prompt")
        encoded = tokenizer.apply_chat_template(
            conversation=prompts,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )
    return [list(ids) for ids in encoded["input_ids"]]


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message["content"]
    return content if isinstance(content, list) else []


def _answer(asked: Generation, rollouts: Sequence[FinishedRollout]) -> dict[str, list[Any]]:
    tokens = [unpack_tokens(rollout.tokens) for rollout in rollouts]
    return {
        "prompt_ids": asked.prompts,
        "completion_ids": [one["id"].tolist() for one in tokens],
        "logprobs": [one["logprob"].tolist() for one in tokens],
        "rollout_id": [rollout.rollout_id for rollout in rollouts],
        "weight_version": [int(one["version"][-1]) for one in tokens],
    }


def _correct_mismatch(trainer: Any) -> None:
    """Have TRL use the engine's logprobs, as it does with its own vLLM. `use_vllm` would start that in the trainer's
    constructor; behind it, only the loss and the metrics ask for it, and the call that publishes weights there."""
    if not trainer.use_vllm:
        trainer.use_vllm, trainer.vllm_generation = True, _Published()
        trainer._last_loaded_step = trainer.state.global_step  # noqa: SLF001 - TRL has no public name for it


class _Published:
    """In the place of TRL's vLLM: `rollout_func` publishes by itself."""

    def sync_weights(self) -> None:
        pass
