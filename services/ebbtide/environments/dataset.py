"""Asks the questions of a data set, one in an episode, and rewards the response by a function.

Splits that the data has not are cut out of its train rows by the questions' text, and questions of the eval and check
splits are left out of the train split. So no question of the eval split is ever trained on, whatever the seed.
"""

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ebbtide.environments import Message, Split, StepResult, parse_params
from ebbtide.environments.dataset_files import DATA_FIELD, DataPlace, RowFile, prepared
from ebbtide.environments.problem_splits import question_key, split_of
from ebbtide.environments.rewards import RewardFunction, checked_reward, load_reward
from ebbtide.errors import InvalidRequest

_SPLITS: Final[tuple[Split, ...]] = ("train", "check", "eval")
_PROMPT_FIELD: Final = "environment.params.prompt"
_ANSWER_FIELD: Final = "environment.params.answer"
_PART: Final = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


class DatasetParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`environment.params` of a `dataset` run."""

    data: Annotated[str, Meta(min_length=1)]  # a JSONL or Parquet file, a folder of such, or a data set of the Hub
    splits: dict[Split, str] = {}
    subset: str = ""
    revision: str = ""
    prompt: Annotated[str, Meta(min_length=1)] = "{prompt}"
    system: str = ""  # a system message before the prompt
    answer: str = "answer"  # column; empty: there is none
    reward: str = "exact"
    reward_params: dict[str, Any] = {}
    right_at: float = 1.0  # reward from which a response counts as right
    reward_out_of_time: float | None = None  # of a computation that was cut; None: its episode fails

    @property
    def place(self) -> DataPlace:
        return DataPlace(data=self.data, splits=self.splits, subset=self.subset, revision=self.revision)


def dataset_params(params: Mapping[str, Any]) -> DatasetParams:
    """Raises `InvalidRequest` naming the parameter."""
    return parse_params(DatasetParams, params)


def with_local_rows(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters of JSONL files with the same rows, for a process that has neither network nor `datasets`.
    Raises `InvalidRequest` naming the parameter."""
    place = prepared(dataset_params(params).place)
    given = {name: value for name, value in params.items() if name not in DataPlace.__struct_fields__}
    return {**given, "data": place.data, "splits": dict(place.splits)}


class PromptTemplate:
    """A text with `{column}` for the columns of a row, and `{{` and `}}` for braces."""

    def __init__(self, template: str) -> None:
        """Raises `InvalidRequest` for a single brace."""
        self._parts: list[tuple[bool, str]] = []  # whether it is a column, and the column or the text
        end = 0
        for found in _PART.finditer(template):
            self._parts.append((False, template[end : found.start()]))
            if found.group() in "{}":
                text = f"has a single {found.group()!r} at character {found.start() + 1}; double it, or close the pair"
                raise InvalidRequest(text, field=_PROMPT_FIELD)
            column = found.group(1)
            self._parts.append((True, column) if column else (False, found.group()[0]))
            end = found.end()
        self._parts.append((False, template[end:]))
        self.columns = tuple(dict.fromkeys(text for is_column, text in self._parts if is_column))
        texts = [text for is_column, text in self._parts if not is_column]
        self._lone = len(self.columns) == 1 and not any(texts)

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """A prompt that is a column alone may be a list of messages, as in conversational data sets."""
        if self._lone and isinstance(value := row[self.columns[0]], list):
            return [Message(str(one["role"]), str(one["content"])) for one in value]
        return [Message("user", "".join(_text(row[text]) if is_column else text for is_column, text in self._parts))]

    def question(self, row: Mapping[str, Any]) -> str:
        """What tells questions apart, whatever the words around them."""
        return "\n".join(_text(row[column]) for column in self.columns)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class DatasetSource:
    """Makes episodes from rows. Train rows come in an order that seed and epoch determine, each once in an epoch; those
    of the other splits in an order of their own, the same for every seed."""

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        """Raises `InvalidRequest` naming the parameter."""
        self.params = dataset_params(params)
        self.seed = seed
        self._template = PromptTemplate(self.params.prompt)
        self._reward = load_reward(self.params.reward, self.params.reward_params)
        self._files: dict[Split, RowFile] = {}
        self._rows: dict[Split, tuple[RowFile, array[int]]] = {}
        self._load(prepared(self.params.place))
        if self.params.reward_out_of_time is not None:
            self.reward_out_of_time = self.params.reward_out_of_time
        given = {**msgspec.to_builtins(self.params), "data": "", "splits": {}}
        digests = {split: file.digest for split, file in self._files.items()}
        self.identity = json.dumps(["dataset", given, digests, seed], sort_keys=True)
        self._order = lru_cache(4)(self._shuffled)

    def make(self, split: Split, index: int) -> "DatasetEpisode":
        """Returns the episode with this number. Rows of the train split come again after all of them have come.

        Raises `InvalidRequest` naming `environment.params.data` when another split has too few rows.
        """
        file, numbers = self._rows[split]
        epoch, place = divmod(index, max(1, len(numbers)))
        if not numbers or (epoch and split != "train"):
            raise InvalidRequest(
                f"the {split} split has only {len(numbers)} rows, {index + 1} are needed; ask for fewer, or give more",
                field=DATA_FIELD,
            )
        row = file.row(numbers[self._order(split, epoch)[place]])
        return DatasetEpisode(self.params, self._template.messages(row), row, self._reward)

    def example(self, split: Split, index: int) -> tuple[list[Message], str]:
        """Returns the prompt of `make(split, index)` and its answer. Raises `InvalidRequest` without answers."""
        if not self.params.answer:
            raise InvalidRequest("there are no answers to learn from; name their column", field=_ANSWER_FIELD)
        episode = self.make(split, index)
        return episode.reset(), _text(episode.answer)

    def _shuffled(self, split: Split, epoch: int) -> "array[int]":
        order = array("q", range(len(self._rows[split][1])))
        Random(f"{self.seed}/{epoch}" if split == "train" else split).shuffle(order)
        return order

    def _load(self, place: DataPlace) -> None:
        """Splits that the place does not name are cut out of the train rows."""
        files = place.files()
        if "train" not in files:
            raise InvalidRequest("name the rows to train on, too", field="environment.params.splits")
        found: dict[Split, array[int]] = {split: array("q") for split in _SPLITS}
        held_out: set[bytes] = set()
        for split in ("eval", "check", "train"):  # train comes last: it must not have what the others have
            if split not in files:
                continue
            file = RowFile(files[split])
            for number, row in file.scan():
                question = self._question(file, number, row)
                key = question_key(question)
                if key in held_out and split != "eval":
                    continue
                part = split_of(question) if split == "train" else split
                found[split if part in files else part].append(number)
                if split != "train":
                    held_out.add(key)
            self._files[split] = file
        for split in _SPLITS:
            self._rows[split] = (self._files.get(split, self._files["train"]), found[split])
        if not found["train"]:
            raise InvalidRequest("no row is left to train on; give more", field=DATA_FIELD)

    def _question(self, file: RowFile, number: int, row: Mapping[str, Any]) -> str:
        """Raises `InvalidRequest` for a row that lacks a column."""
        wanted = {_PROMPT_FIELD: self._template.columns, _ANSWER_FIELD: (self.params.answer,)}
        for field, columns in wanted.items():
            for column in filter(None, columns):
                if row.get(column) is None:
                    has = ", ".join(sorted(row))[:200]
                    text = f"row {number + 1} of {file.path.name} has no {column!r}; it has {has}"
                    raise InvalidRequest(text, field=field)
        return self._template.question(row)


@dataclass(frozen=True)
class DatasetEpisode:
    """One row: its prompt, then one response. `info` counts `right` and `asked`, and has what the function reports."""

    params: DatasetParams
    prompt: list[Message]
    row: Mapping[str, Any]
    function: RewardFunction

    @property
    def answer(self) -> Any:
        return self.row[self.params.answer] if self.params.answer else None

    def reset(self) -> list[Message]:
        return [*([Message("system", self.params.system)] if self.params.system else []), *self.prompt]

    def step(self, response: str) -> StepResult:
        reward, numbers = checked_reward(self.function(response, self.answer, self.row))
        info = {"right": float(reward >= self.params.right_at), "asked": 1.0, **numbers}
        return StepResult(reward=reward, done=True, info=info)
