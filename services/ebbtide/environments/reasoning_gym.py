"""Asks questions from any data set of reasoning-gym, one or several in a prompt, and verifies the answers."""

import difflib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from random import Random
from typing import Annotated, Any

import msgspec
import reasoning_gym
from msgspec import Meta
from reasoning_gym.factory import DATASETS

from ebbtide.environments import Message, Split, StepResult, parse_params
from ebbtide.environments.problem_splits import split_of
from ebbtide.errors import InvalidRequest

#: Size of a data set. Most data sets derive an item from its number, and make it when it is asked for.
ITEMS = 2**31 - 1
#: A split counts as exhausted after this many draws in a row without a new question.
MAX_DRAWS = 5000


class ReasoningGymParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`environment.params` of a `reasoning_gym` run."""

    dataset: str
    dataset_params: dict[str, Any] = {}
    questions_per_prompt: Annotated[int, Meta(ge=1, le=64)] = 1
    #: None: the prompt is the full question, and the answer stands in `<answer>` tags. Otherwise, for models too small
    #: to read, the prompt is only this field of each question's metadata, and the whole response is the answer.
    payload_key: str | None = None
    separator: Annotated[str, Meta(min_length=1)] = "\n"  # between payloads, and between their answers
    partial_credit: bool = False  # rewards the mean of the verifier's scores, not the share of right answers


class ReasoningGymSource:
    """Makes prompts from (seed, split, index).

    Invariant: `_distinct[split]` is a prefix of one endless sequence that only (params, seed, split) determine. It only
    grows, under the lock; a restart rebuilds it. Train prompts are drawn by index, without it.
    """

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        """Raises `InvalidRequest` naming `environment.params.dataset`, `.dataset_params` or `.payload_key`."""
        self.params = parse_params(ReasoningGymParams, params)
        self.seed = seed
        self.identity = json.dumps(
            ["reasoning_gym", version("reasoning-gym"), msgspec.to_builtins(self.params), seed], sort_keys=True
        )
        self._dataset = _create(self.params, seed)
        self._distinct: dict[Split, dict[str, dict[str, Any]]] = {"check": {}, "eval": {}}
        self._draws: dict[Split, Random] = {split: Random(f"{seed}/{split}") for split in self._distinct}
        self._lock = threading.Lock()
        key = self.params.payload_key
        if key is not None and key not in (known := self._dataset[0]["metadata"]):
            raise InvalidRequest(
                f"{self.params.dataset!r} has no metadata {key!r}; it has {', '.join(sorted(known))}",
                field="environment.params.payload_key",
            )

    def make(self, split: Split, index: int) -> "Questions":
        """Returns the prompt with this number. Prompts of the check and eval splits share no question.

        Raises `InvalidRequest` naming `environment.params.dataset` when the split has too few distinct questions.
        """
        count = self.params.questions_per_prompt
        if split == "train":
            rng = Random(f"{self.seed}/{split}/{index}")
            found: dict[str, dict[str, Any]] = {}
            self._extend(found, split, rng, count)
            return Questions(self.params, self._dataset, tuple(found.values()))
        with self._lock:
            self._extend(self._distinct[split], split, self._draws[split], (index + 1) * count)
            entries = list(self._distinct[split].values())[index * count : (index + 1) * count]
        return Questions(self.params, self._dataset, tuple(entries))

    def example(self, split: Split, index: int) -> tuple[list[Message], str]:
        """Returns the prompt of `make(split, index)` and the data set's answer. Raises `InvalidRequest` without one."""
        environment = self.make(split, index)
        if any(entry["answer"] is None for entry in environment.entries):
            raise InvalidRequest(
                f"{self.params.dataset!r} only checks answers and has none to learn from; train from a checkpoint",
                field="environment.params.dataset",
            )
        return environment.reset(), environment.reference()

    def _extend(self, found: dict[str, dict[str, Any]], split: Split, rng: Random, count: int) -> None:
        draws = 0
        while len(found) < count:
            entry = self._dataset[rng.randrange(len(self._dataset))]
            draws += 1
            if split_of(entry["question"]) == split and entry["question"] not in found:
                found[entry["question"]] = entry
                draws = 0
            if draws >= MAX_DRAWS:
                raise InvalidRequest(
                    f"{self.params.dataset!r} has only {len(found)} distinct {split} questions that {MAX_DRAWS} draws "
                    f"could find, {count} are needed; ask for fewer, or set dataset_params for a larger data set",
                    field="environment.params.dataset",
                )


@dataclass(frozen=True)
class Questions:
    """One prompt of one or several questions, with a single turn. `info` counts `right` and `asked`."""

    params: ReasoningGymParams
    dataset: Any
    entries: tuple[dict[str, Any], ...]

    def reset(self) -> list[Message]:
        key, texts = self.params.payload_key, [entry["question"] for entry in self.entries]
        if key is not None:
            payloads = [str(entry["metadata"][key]) for entry in self.entries]
            return [Message("user", self.params.separator.join(payloads))]
        if len(texts) == 1:
            return [Message("user", f"{texts[0]}\n\nGive your answer between <answer> and </answer>.")]
        numbered = "\n\n".join(f"Question {number}:\n{text}" for number, text in enumerate(texts, 1))
        ask = "Answer the questions in order, each answer between its own <answer> and </answer>."
        return [Message("user", f"{numbered}\n\n{ask}")]

    def step(self, response: str) -> StepResult:
        answers = self._split(response)
        scores = [float(self.dataset.score_answer(*pair)) for pair in zip(answers, self.entries, strict=True)]
        # Exactly one: for wrong answers some verifiers add up partial scores to almost one.
        right = sum(score == 1.0 for score in scores)
        credit = sum(min(max(score, 0.0), 1.0) for score in scores) if self.params.partial_credit else right
        asked = len(self.entries)
        return StepResult(reward=credit / asked, done=True, info={"right": float(right), "asked": float(asked)})

    def reference(self) -> str:
        """Returns the data set's answers, in the form that the prompt asks for."""
        answers = [str(entry["answer"]) for entry in self.entries]
        if self.params.payload_key is not None:
            return self.params.separator.join(answers)
        return "\n".join(f"<answer>{answer}</answer>" for answer in answers)

    def _split(self, response: str) -> list[str | None]:
        """Returns an answer for each question, or None.

        Of too many tagged answers the last ones count, as a model may think aloud; of bare ones the first count.
        """
        count = len(self.entries)
        if self.params.payload_key is not None:
            found = response.split(self.params.separator)[:count] if count > 1 else [response]
        else:
            pieces = response.split("<answer>")[1:]
            found = [piece.split("</answer>")[0].strip() for piece in pieces if "</answer>" in piece][-count:]
        return [*found, *[None] * (count - len(found))]


def _create(params: ReasoningGymParams, seed: int) -> Any:
    if params.dataset not in DATASETS:
        near = difflib.get_close_matches(params.dataset, DATASETS) or sorted(DATASETS)[:5]
        raise InvalidRequest(
            f"reasoning-gym has no data set {params.dataset!r}; did you mean {', '.join(near)}?",
            field="environment.params.dataset",
        )
    try:
        return reasoning_gym.create_dataset(params.dataset, **{"seed": seed, "size": ITEMS, **params.dataset_params})
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise InvalidRequest(
            f"{params.dataset!r} does not take these: {error} (size is {ITEMS} where they set none)",
            field="environment.params.dataset_params",
        ) from error
