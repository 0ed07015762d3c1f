"""Claims runs and works on them, one after another, in a trainer or driver process.

What both share stands here: the loop that claims, follows and ends runs, conversations, and the check of a model's
directory without loading it. Their settings are in `ebbtide.run_settings`.

Invariant: the process holds at most one lease, and its work ends before the next claim. If the process dies, the lease
expires, or ends at once when a process of the same holder name claims the run.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ebbtide.client import Client, Lease
from ebbtide.environments import Message
from ebbtide.errors import EbbtideError, InvalidRequest, LeaseSuperseded, NoCapacity, Unavailable
from ebbtide.hub_models import cached_model, no_directory, tokenizer_folder
from ebbtide.run_settings import WorkSettings
from ebbtide.runtime import Shutdown, race
from ebbtide.step_pacing import first_announced
from ebbtide.telemetry import bind, get_logger
from ebbtide.types.ids import new_fence
from ebbtide.types.run import RunEvent, RunStatus
from ebbtide.types.spec_file import NO_LORA
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights import end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_model_directory(directory: Path, *, field: str = "model") -> None:
    """Raises `InvalidRequest` naming `field` unless `directory` is a Hugging Face checkpoint in safetensors with a
    tokenizer whose ids all have a row in the embedding."""
    try:
        _check_checkpoint(directory, field)
    except (AttributeError, TypeError, KeyError, OSError) as error:  # its JSON files have unexpected shapes
        raise InvalidRequest(
            f"{str(directory)[:200]!r} is damaged ({type(error).__name__}: {str(error)[:200]}); copy it again",
            field=field,
        ) from error


def _check_checkpoint(directory: Path, field: str) -> None:
    if not directory.is_dir():
        raise InvalidRequest(no_directory(str(directory)), field=field)
    if (directory / "adapter_config.json").exists():
        raise InvalidRequest(NO_LORA, field=field)
    config = _read(directory / "config.json", field)
    if not any(directory.glob("*.safetensors")):
        pickled = any(path for pattern in _PICKLED for path in directory.glob(pattern))
        reason = "has only pickled weights, which are never loaded; convert them to" if pickled else "holds no"
        raise InvalidRequest(f"{str(directory)!r} {reason} safetensors", field=field)
    for shard in _shards(directory, field):
        if not (directory / shard).is_file():
            raise InvalidRequest(f"the index names {shard!r}, which is missing; copy the checkpoint again", field=field)
    for path in directory.glob("*.safetensors"):
        _check_whole(path, field)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise InvalidRequest(f"{str(directory)!r} has no tokenizer; save one next to the weights", field=field)
    rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    highest = highest_token_id(directory, field=field)
    if isinstance(rows, int) and highest >= rows:
        raise vocabulary_mismatch(highest, rows, field)


def _check_whole(path: Path, field: str) -> None:
    """Checks the header, without reading the weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise InvalidRequest(f"{str(path)!r} is damaged ({error}); copy it again", field=field) from None


def highest_token_id(directory: Path, *, field: str = "model") -> int:
    """Returns the highest id in `tokenizer.json`, or -1 if the tokenizer is stored in another form."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return -1
    content = _read(path, field)
    vocabulary = content.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    return max([*ids, *(token["id"] for token in content.get("added_tokens", []))], default=-1)


def vocabulary_mismatch(highest: int, rows: int, field: str = "model") -> InvalidRequest:
    return InvalidRequest(
        f"vocabulary mismatch: the tokenizer gives ids up to {highest}, the embedding has {rows} rows; "
        "use the tokenizer that belongs to the weights",
        field=field,
    )


def _shards(directory: Path, field: str) -> set[str]:
    index = directory / "model.safetensors.index.json"
    return set(_read(index, field).get("weight_map", {}).values()) if index.exists() else set()


def _read(path: Path, field: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequest(f"{str(path.parent)!r} is no checkpoint: it has no {path.name}", field=field) from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{str(path)!r} cannot be read: {error}", field=field) from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{str(path)!r} holds no JSON object", field=field)
    return content


log = get_logger(__name__)
Role = Literal["trainer", "driver"]
Work = Callable[[Client, Lease], Awaitable[None]]

#: Pause before the next claim after an unreachable service interrupted a run.
_PAUSE_S: Final = 2.0


async def serve(settings: WorkSettings, shutdown: Shutdown, role: Role, work: Work) -> None:
    """Claims runs and calls `work` for each, until shutdown; with `once` or a run id, until that run is over."""
    client = Client(settings.coordinator, settings.relay, security=settings.security, patience_s=settings.patience_s)
    async with client:
        shutdown.ready(settings.coordinator)
        await race(_runs(client, settings, role, work), shutdown.requested.wait())


async def _runs(client: Client, settings: WorkSettings, role: Role, work: Work) -> None:
    while not (await _one_run(client, settings, role, work) and (settings.once or settings.run_id)):
        pass


async def _one_run(client: Client, settings: WorkSettings, role: Role, work: Work) -> bool:
    """Works on one run under one lease. Returns whether the run is over for this process."""
    try:
        async with client.claim(settings.run_id or None, role, holder=settings.holder) as lease:
            bind(run_id=lease.run_id)
            log.info("claimed a run", role=role)
            await _under(lease, work(client, lease))
    except LeaseSuperseded as error:
        log.info("stepping down", reason=str(error))
        return True
    except (Unavailable, NoCapacity) as error:
        log.warning("interrupted; taking the run up again", reason=str(error))
        await asyncio.sleep(_PAUSE_S)
        return False
    log.info("the run has ended", run_id=lease.run_id)
    return True


async def _under(lease: Lease, work: Awaitable[None]) -> None:
    """Runs `work` until the lease is lost. Fails the run if the run is at fault."""
    try:
        await race(work, lease.lost.wait())
    except (InvalidRequest, RunFailed) as error:
        log.error("the run failed", reason=str(error))  # noqa: TRY400 - the reason says it all
        await lease.finish(RunStatus.FAILED, str(error))
    except (Unavailable, NoCapacity) as error:
        warning = RunEvent(kind="warning", key=new_fence(), message=f"the {lease.role} is interrupted: {error}")
        with contextlib.suppress(EbbtideError, TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await lease.report([warning])
        raise


# Turns messages into tokens and back. Sampled tokens are never decoded and encoded again.
#
# The chat template renders the opening of an episode as a whole. For later turns it renders the new messages after a
# stand-in for the response, and only the text after the stand-in is encoded. That text (the end of the assistant's
# turn, the new messages, the next turn's header) counts as the environment's: no loss falls on it.

#: All samples of a group have the same opening, so it is rendered and encoded once.
_OPENINGS: Final = 64
#: Stands for a response while a template is rendered; no template contains it.
_RESPONSE: Final = "\u27e6the response\u27e7"


class Conversations:
    """Converts the messages of one run by the tokenizer's chat template, or as raw text if it has none."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, context: int, end_ids: frozenset[int]) -> None:
        """`context`: most tokens of prompt and response together; 0: unknown. `end_ids` end a response."""
        self._tokenizer = tokenizer
        self._templated = bool(tokenizer.chat_template)
        self.context = context
        self.end_ids = end_ids
        self._openings = lru_cache(_OPENINGS)(self._opening)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Returns token ids of the first prompt. Raises `InvalidRequest` if it has no token, or too many."""
        return list(self._openings(tuple(messages)))

    def _opening(self, messages: Sequence[Message]) -> list[int]:
        if self._templated:
            ids = self._encode(self._render(messages), special=False)
        else:
            ids = self._encode("".join(message.content for message in messages), special=True)
        if not ids:
            raise InvalidRequest("the opening messages hold no token", field="environment")
        if self.context and len(ids) >= self.context:
            raise InvalidRequest(
                f"a prompt of {len(ids)} tokens leaves no room in the model's context of {self.context}; "
                "ask for less in environment.params, or take a model with a longer context",
                field="environment",
            )
        return ids

    def following(self, opening: Sequence[Message], response: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of `messages` between `response` (ids as sampled) and the next one."""
        if not self._templated:
            return self._encode("".join(message.content for message in messages), special=False)
        text = self._render([*opening, Message("assistant", _RESPONSE), *messages])
        if _RESPONSE not in text:
            raise InvalidRequest("the chat template leaves out the assistant's turns: one turn only", field="model")
        ids = self._encode(text.rpartition(_RESPONSE)[2], special=False)
        # The template closes the assistant's turn; if the policy closed it itself, that token exists already.
        return ids[1:] if ids and response and response[-1] == ids[0] else ids

    def text(self, response: Sequence[int]) -> str:
        """Returns the response as text, without its end token."""
        ids = list(response[:-1] if response and response[-1] in self.end_ids else response)
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def raw_text(self, ids: Sequence[int]) -> str:
        """Returns tokens as text, special ones included."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _render(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [message.as_dict() for message in messages], add_generation_prompt=True, tokenize=False
                )
            )
        except TemplateError as error:
            message = f"its chat template refuses the environment's messages: {error}"
            raise InvalidRequest(message, field="model") from None

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))


def load_conversations(model: str, *, stop_token_ids: Sequence[int] = ()) -> Conversations:
    """Loads the tokenizer of the checkpoint `model`, a directory or a name of the Hub, which is asked for no weights.
    Raises `InvalidRequest` naming `model`."""
    folder = tokenizer_folder(model)
    if cached_model(model) is not None:  # of others only the tokenizer is here
        check_model_directory(folder)
    config = _read(folder / "config.json", "model")
    tokenizer = _load_tokenizer(folder)
    text_config = config.get("text_config", config)
    ends = (tokenizer.eos_token_id, *stop_token_ids, *end_tokens(folder))
    return Conversations(
        tokenizer,
        context=int(text_config.get("max_position_embeddings") or 0),
        end_ids=frozenset(int(end) for end in ends if end is not None),
    )


def _load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Loads it without torch if there is a tokenizer.json: that takes 1 s and 65 MiB, not 4 s and 400 MiB."""
    try:
        if (folder / "tokenizer.json").exists():
            from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(f"no tokenizer can be loaded from {str(folder)!r}: {error}", field="model") from error


class RunFailed(EbbtideError):
    """The run itself is at fault and cannot go on; the message says why."""


# Follows a run's events for the trainer or driver that works on the run.
#
# Invariant: the fields hold what the events read so far said, in order. Each process rebuilds them from the first
# event.

#: A group has no trajectories. Reported before its episodes are dropped, so that no trainer waits for it.
GROUP_DROPPED: Final = "group_dropped"
#: A group's rewards are all equal, so another one takes its place. Reported before its episodes are dropped, so that a
#: driver that restarts draws the same.
GROUP_REDRAWN: Final = "group_redrawn"
#: A checkpoint is durable. Reported before its trajectories are committed, which deletes them.
CHECKPOINT: Final = "checkpoint"
#: A step of rounds begins groups, or takes them. Reported before the groups are submitted, or completed.
ROUND_OPENED: Final = "round_opened"
ROUND_TAKEN: Final = "round_taken"
#: A driver or a trainer has taken up the run.
ATTACHED: Final = "attached"


class RunFollower:
    def __init__(self, client: Client, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._changed = asyncio.Condition()
        self._attached: set[str] = set()
        self.ended = False  # all events of the run were read
        self.versions: dict[int, int] = {}  # step -> the version first announced for it
        self.steps: dict[int, int] = {}  # version -> its step
        self.evaluated: set[int] = set()  # steps whose evaluation was reported
        self.dropped: Counter[int] = Counter()  # step -> groups without trajectories
        self.redrawn: set[str] = set()  # groups for which another one was drawn
        self.checkpoints: dict[int, str] = {}  # step -> path
        self.begun: dict[int, int] = {}  # step of rounds -> groups that it and those before it began
        self.taken: dict[int, int] = {}  # group of rounds -> the step that trains on it

    async def run(self) -> RunStatus:
        """Follows the run to its end. Returns its final status."""
        async for event in self._client.watch(self._run_id):
            self._take(event)
            await self.notify()
        self.ended = True
        return (await self._client.run(self._run_id)).status

    async def catch_up(self, lease: Lease) -> None:
        """Reports an event and waits until it is read: all earlier events are read then."""
        key = new_fence()
        await lease.report([RunEvent(kind=ATTACHED, key=key, message=f"a {lease.role} works on the run")])
        await self.until(lambda: key in self._attached)

    async def notify(self) -> None:
        """Wakes the waiters, whose predicates may depend on more than events."""
        async with self._changed:
            self._changed.notify_all()

    def announced(self, version: PolicyVersion) -> None:
        """Takes in a version that the holder announced itself, before its event arrives."""
        self.steps[version.version] = version.step
        self.versions = dict(first_announced(self.versions, (version.version, version.step)))

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Waits until `predicate` holds."""
        async with self._changed:
            await self._changed.wait_for(predicate)

    def _take(self, event: RunEvent) -> None:
        if event.kind == "version":
            number, step = int(event.values["version"]), int(event.values["step"])
            self.announced(PolicyVersion(policy="", version=number, step=step))
        elif event.kind == "evaluation":
            self.evaluated.add(int(event.values["step"]))
        elif event.kind == GROUP_DROPPED:
            self.dropped[int(event.values["step"])] += 1
        elif event.kind == GROUP_REDRAWN:
            self.redrawn.add(event.key)
        elif event.kind == CHECKPOINT:
            self.checkpoints[int(event.values["step"])] = event.labels["path"]
        elif event.kind == ROUND_OPENED:
            self.begun[int(event.values["step"])] = int(event.values["begun"])
        elif event.kind == ROUND_TAKEN:
            self.taken |= dict.fromkeys(map(int, event.labels["groups"].split()), int(event.values["step"]))
        elif event.kind == ATTACHED:
            self._attached.add(event.key)
