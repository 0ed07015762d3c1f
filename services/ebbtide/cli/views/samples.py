"""Shows what a run's policy answered: prompts, responses, rewards, versions, and the workers that generated them.

The coordinator has all episodes that no durable checkpoint holds yet, and deletes them with that checkpoint. Of earlier
steps, and of runs that have ended, there are the samples that the trainer kept in `OUTPUT/RUN/samples.jsonl`, if that
is on this machine. Timelines say which worker generated which tokens.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct
from rich.console import Console
from rich.text import Text

from ebbtide.cli.views.tables import plain
from ebbtide.cli.waiting import Waiting
from ebbtide.errors import InvalidRequest
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import AttemptSpan, Run
from ebbtide.types.tokens import unpack_ids, unpack_tokens

if TYPE_CHECKING:
    from ebbtide.client import Client

#: Makes token ids text, with special tokens.
Decode = Callable[[Sequence[int]], str]
#: Silence after which a live run is taken to have no further episodes here.
_SILENCE_S: Final = 2.0
SAMPLES_FILE: Final = "samples.jsonl"
#: Characters of a prompt, and of a response, on a terminal; JSON has all.
_SHOWN: Final = 2_000


_Either = TypeVar("_Either", bound="Sample | Trajectory")


class SampleFilter(Struct, frozen=True, kw_only=True):
    """Which samples are asked for."""

    step: int | None = None  # the optimiser step that trains on them, from 1 on
    group: str = ""
    worst: bool = False  # the lowest rewards first; otherwise in order
    most: int = 8

    def fits(self, one: "Sample | Trajectory") -> bool:
        _, step, group, _ = _place(one)
        return self.step in (None, step) and self.group in ("", group)

    def chosen(self, samples: Iterable[_Either]) -> list[_Either]:
        """Those that are asked for, in the order in which they are shown."""
        fitting = [one for one in samples if self.fits(one)]
        fitting.sort(key=lambda one: (_place(one)[0] if self.worst else 0.0, *_place(one)[1:]))
        return fitting[: self.most]


def _place(one: "Sample | Trajectory") -> tuple[float, int, str, str]:
    """Reward, step, group and episode."""
    if isinstance(one, Trajectory):
        return one.reward, one.step + 1, one.group_id, one.episode_id
    return one.reward, one.step, one.group, one.episode


class Part(Struct, frozen=True, kw_only=True):
    """Consecutive tokens of a response that one worker generated."""

    worker: str
    turn: int
    first: int  # within the turn's response
    last: int  # exclusive
    first_version: int
    last_version: int


class Passage(Struct, frozen=True, kw_only=True):
    text: str
    sampled: bool  # by the policy; otherwise the environment wrote it


class Sample(Struct, frozen=True, kw_only=True):
    """An episode as it was trained on."""

    step: int
    group: str
    episode: str
    reward: float
    tokens: int  # sampled ones
    first_version: int
    last_version: int
    prompt: str
    response: list[Passage]
    truncated: bool | None = None  # None: not known any more
    metrics: dict[str, float] = {}
    #: Empty: the timeline has no attempts of it any more.
    workers: list[Part] = []


async def fetch(client: "Client", run_id: str, wanted: SampleFilter, model: str = "") -> list[Sample]:
    """Fetches samples of a run. `model`: a folder with its tokenizer, if the run's own is not here.

    Raises `NotFound`, and `InvalidRequest` if there is no sample, or no tokenizer.
    """
    run = await client.run(run_id)
    stored = await _stored(client, run, wanted)
    kept = Path(run.spec.output) / run_id / SAMPLES_FILE
    others = [one for one in await asyncio.to_thread(_kept, kept) if one.episode not in stored.episodes]
    found: list[Sample | Trajectory] = [*stored.fitting, *others]
    picked = wanted.chosen(found)
    if not picked:
        raise InvalidRequest(_nothing(stored.steps | {one.step for one in others}, kept, run), field="RUN")
    chosen = await asyncio.to_thread(_with_texts, picked, model or run.spec.model)
    parts = await _parts(client, run_id, {one.episode for one in chosen})
    return [_with_workers(one, parts) for one in chosen]


def _with_texts(picked: Sequence[Sample | Trajectory], model: str) -> list[Sample]:
    coded = any(isinstance(one, Trajectory) for one in picked)
    decode: Decode = _decoder(model) if coded else lambda _: ""
    return [sample(one, decode) if isinstance(one, Trajectory) else one for one in picked]


def sample(trajectory: Trajectory, decode: Decode) -> Sample:
    """Returns a trajectory with its texts."""
    tokens = unpack_tokens(trajectory.tokens)
    ids, versions = tokens["id"].tolist(), tokens["version"].tolist()
    made = [version for version, mask in zip(versions, trajectory.loss_mask, strict=True) if mask]
    return Sample(
        step=trajectory.step + 1,
        group=trajectory.group_id,
        episode=trajectory.episode_id,
        reward=trajectory.reward,
        tokens=len(made),
        first_version=min(made, default=0),
        last_version=max(made, default=0),
        prompt=decode(unpack_ids(trajectory.prompt_ids).tolist()),
        response=list(_passages(ids, trajectory.loss_mask, decode)),
        truncated=trajectory.truncated,
        metrics=trajectory.metrics,
    )


def _passages(ids: Sequence[int], mask: bytes, decode: Decode) -> Iterator[Passage]:
    at = 0
    for sampled, run in groupby(mask):
        end = at + sum(1 for _ in run)
        yield Passage(text=decode(ids[at:end]), sampled=bool(sampled))
        at = end


class _Stored(Struct):
    """What the coordinator has now."""

    fitting: list[Trajectory] = []  # with all that are asked for
    episodes: set[str] = set()
    steps: set[int] = set()


async def _stored(client: "Client", run: Run, wanted: SampleFilter) -> _Stored:
    """Holds few trajectories at a time: all of a run may be gigabytes."""
    rollouts, heard, found = run.counters.get("trajectories", 0), 0, _Stored()
    if run.status.ended or not rollouts:
        return found
    async with aclosing(client.trajectories(run.run_id)) as stream:
        with Waiting(f"the episodes of {run.run_id}") as waiting:
            try:
                while heard < rollouts:
                    async with asyncio.timeout(_SILENCE_S):
                        one = await anext(stream)
                    waiting.heard()
                    heard += one.rollouts
                    found.episodes.add(one.episode_id)
                    found.steps.add(one.step + 1)
                    if wanted.fits(one):
                        found.fitting.append(one)
                    if len(found.fitting) > 2 * wanted.most:
                        found.fitting = wanted.chosen(found.fitting)
            except (StopAsyncIteration, TimeoutError):  # the run ended, or a checkpoint took the others meanwhile
                pass
    return found


def _kept(path: Path) -> list[Sample]:
    """What the trainer kept in its file; lines that cannot be read are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found: dict[tuple[int, str], Sample] = {}
    for line in lines:
        try:
            row: dict[str, Any] = json.loads(line)
            first, _, last = str(row["versions"]).partition("-")
            one = Sample(
                step=int(row["step"]),
                group=str(row["group"]),
                episode=str(row["episode"]),
                reward=float(row["reward"]),
                tokens=int(row["tokens"]),
                first_version=int(first),
                last_version=int(last or first),
                prompt=str(row["prompt"]),
                response=[Passage(text=str(row["completion"]), sampled=True)],
            )
        except (ValueError, KeyError, TypeError):  # cut by a kill, or of another release
            continue
        found[one.step, one.episode] = one  # a step that was trained again comes again
    return list(found.values())


async def _parts(client: "Client", run_id: str, episodes: set[str]) -> Mapping[str, list[Part]]:
    """Episode -> who generated it, from the run's timeline."""
    found: defaultdict[str, list[Part]] = defaultdict(list)
    async for span in client.timeline(run_id):
        if span.episode_id in episodes and span.last > span.first:
            found[span.episode_id].append(_part(span))
    return found


def _part(span: AttemptSpan) -> Part:
    return Part(
        worker=span.worker_id,
        turn=span.turn,
        first=span.first,
        last=span.last,
        first_version=span.first_version,
        last_version=span.last_version,
    )


def _with_workers(one: Sample, parts: Mapping[str, list[Part]]) -> Sample:
    from msgspec.structs import replace

    return replace(one, workers=sorted(parts.get(one.episode, ()), key=lambda part: (part.turn, part.first)))


def _decoder(model: str) -> Decode:
    from ebbtide.hub_models import cached_model
    from ebbtide.run_client import load_conversations

    if cached_model(model) is None:  # it is not fetched: gigabytes, to show some text
        text = f"{model!r} is not in this machine's cache of the Hub; name a folder that has the run's tokenizer"
        raise InvalidRequest(text, field="--model")
    try:
        return load_conversations(model).raw_text
    except InvalidRequest as error:
        text = f"the run's tokenizer is not to be had here ({error.text}); name a folder that has it"
        raise InvalidRequest(text, field="--model") from None


def _nothing(steps: set[int], kept: Path, run: Run) -> str:
    if steps:
        some = ", ".join(map(str, sorted(steps)[-8:]))
        return f"no such sample; there are some of steps {some}, with `run samples` alone"
    if run.status.ended:
        return f"has ended, so the coordinator has none of its samples any more, and {str(kept)!r} is not here"
    return f"has no samples that are not in a checkpoint yet, and {str(kept)!r} is not here; try again later"


def print_samples(samples: Sequence[Sample], console: Console | None = None) -> None:
    """Prints samples for people: control characters become spaces, and long texts are cut in the middle."""
    console = console or Console(highlight=False)
    for one in samples:
        console.print(Text(" · ".join(_facts(one)), style="bold"))
        for worker in _workers(one):
            console.print(Text(f"  {worker}", style="dim"))
        console.print(Text(f"  prompt    {_cut(one.prompt)}"))
        for passage in one.response:
            style, name = ("green", "response ") if passage.sampled else ("dim", "environment")
            console.print(Text(f"  {name} {_cut(passage.text)}", style=style))
        console.print()


def _facts(one: Sample) -> Iterator[str]:
    yield plain(one.episode)
    yield f"step {one.step}"
    yield f"reward {one.reward:.4g}"
    yield f"version {one.first_version}" + (f"-{one.last_version}" if one.last_version != one.first_version else "")
    yield f"{one.tokens:,} tokens{', truncated' if one.truncated else ''}"


def _workers(one: Sample) -> Iterator[str]:
    for part in one.workers:
        turn = f"turn {part.turn}, " if part.turn or one.workers[-1].turn else ""
        yield f"{plain(part.worker)}: {turn}tokens {part.first} to {part.last}"


def _cut(text: str) -> str:
    shown = plain(text.replace("\n", "⏎"))
    if len(shown) <= _SHOWN:
        return shown
    return f"{shown[: _SHOWN // 2]} [...] {shown[-_SHOWN // 2 :]}"
