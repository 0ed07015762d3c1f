"""The environment `dataset`: rows, splits, prompts and answers."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ebbtide.environments import Message, Split, checked_result, load_source, needs_isolation
from ebbtide.environments.dataset import DatasetSource, with_local_rows
from ebbtide.errors import InvalidRequest

WORDS = {"prompt": "{word}", "answer": "reversed"}


def rows(words: Iterable[str]) -> list[dict[str, Any]]:
    return [{"word": word, "reversed": word[::-1]} for word in words]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(data: str, seed: int = 0, **params: Any) -> DatasetSource:
    return DatasetSource({"data": data, **WORDS, **params}, seed)


def asked(source: DatasetSource, split: Split, count: int) -> list[str]:
    return [source.make(split, index).reset()[-1].content for index in range(count)]


@pytest.fixture
def words(tmp_path: Path) -> str:
    return write(tmp_path / "words.jsonl", rows(f"word{number}" for number in range(400)))


def test_each_row_is_asked_once_in_an_epoch_and_in_another_order_in_the_next(words: str) -> None:
    made = source(words)
    count = len({*asked(made, "train", 400)})
    first, second = asked(made, "train", count), asked(made, "train", 2 * count)[count:]
    assert Counter(first) == Counter(second)
    assert first != second
    assert max(Counter(first).values()) == 1
    assert first == asked(source(words), "train", count)
    assert first != asked(source(words, seed=1), "train", count)


def test_no_question_of_one_split_is_in_another_and_every_seed_is_evaluated_on_the_same(words: str) -> None:
    one, other = source(words), source(words, seed=1)
    train = {*asked(one, "train", 800), *asked(other, "train", 800)}
    assert not train & {*asked(one, "eval", 60)}
    assert not train & {*asked(one, "check", 10)}
    assert asked(one, "eval", 60) == asked(other, "eval", 60)


def test_other_words_around_a_question_leave_it_in_its_split(words: str) -> None:
    bare = source(words)
    asking = source(words, prompt="Reverse {word}, please.")
    assert [f"Reverse {word}, please." for word in asked(bare, "eval", 60)] == asked(asking, "eval", 60)


def test_splits_of_the_data_are_kept_and_what_they_share_is_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", rows(["one", "two", "THREE", *(f"more{n}" for n in range(60))]))
    write(tmp_path / "b.jsonl", rows(["three", "four"]))
    made = source(str(tmp_path), splits={"train": "a.jsonl", "eval": "b.jsonl"})
    assert {*asked(made, "eval", 2)} == {"three", "four"}
    train = {*asked(made, "train", 200)}
    assert "THREE" not in train
    assert len(train) > 50
    check = {*asked(made, "check", 1)}  # cut out of the rows to train on
    assert not check & {*train, "three", "four"}


def test_a_split_with_too_few_rows_says_how_many_it_has(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", rows(f"word{n}" for n in range(9)))
    write(tmp_path / "b.jsonl", rows(["three", "four"]))
    made = source(str(tmp_path), splits={"train": "a.jsonl", "eval": "b.jsonl"})
    with pytest.raises(InvalidRequest, match=r"environment\.params\.data: .*only 2 rows, 3 are needed"):
        made.make("eval", 2)


def test_an_episode_rewards_the_answer_and_its_example_earns_the_reward(words: str) -> None:
    made = source(words, system="Reverse words.")
    opening, answer = made.example("train", 7)
    episode = made.make("train", 7)
    assert episode.reset() == opening
    assert opening[0] == Message("system", "Reverse words.")
    assert answer == opening[1].content[::-1]
    right, wrong = (checked_result(episode.step(text)) for text in (f" {answer}\n", answer + "x"))
    assert (right.reward, right.done, right.info) == (1.0, True, {"right": 1.0, "asked": 1.0})
    assert (wrong.reward, wrong.info["right"]) == (0.0, 0.0)


def test_a_template_takes_columns_of_any_kind_and_doubled_braces(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", [{"a b": [1, "x"], "n": 3, "answer": "y"}] * 2)
    made = DatasetSource({"data": data, "prompt": "{{{n}}} {a b} {{x}}"}, 0)
    split: Split = next(split for split in ("train", "check", "eval") if len(made._rows[split][1]))
    assert asked(made, split, 1) == ['{3} [1, "x"] {x}']


def test_a_prompt_may_be_a_column_of_messages(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    data = write(tmp_path / "a.jsonl", [{"prompt": [*talk, {"role": "user", "content": str(n)}]} for n in range(30)])
    made = DatasetSource({"data": data, "answer": "", "reward": "regex", "reward_params": {"pattern": "."}}, 0)
    assert [message.role for message in made.make("train", 0).reset()] == ["system", "user", "user"]


def test_the_identity_changes_with_rows_and_parameters_and_not_with_the_path(words: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(Path(words).read_bytes())
    assert source(words).identity == source(str(copy)).identity
    copy.write_bytes(Path(words).read_bytes() + b'{"word": "x", "reversed": "x"}\n')
    identities = {source(words).identity, source(str(copy)).identity, source(words, reward="number").identity}
    assert len(identities) == 3


def test_parameters_for_an_isolated_process_ask_the_same(words: str, tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", rows(["three", "four"]))
    for given in ({"data": words}, {"data": str(tmp_path), "splits": {"train": "words.jsonl", "eval": "b.jsonl"}}):
        local = with_local_rows({**WORDS, **given})
        assert local.keys() >= WORDS.keys()
        assert asked(DatasetSource(local, 3), "train", 20) == asked(DatasetSource({**WORDS, **given}, 3), "train", 20)


def test_only_rewards_that_run_no_code_and_end_by_themselves_run_in_threads() -> None:
    assert not needs_isolation("dataset", {})
    assert not needs_isolation("dataset", {"reward": "number"})
    for reward in ("regex", "code", "math_verify", "mine:reward", 3):
        assert needs_isolation("dataset", {"reward": reward})


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ({"data": "absent.jsonl"}, "data", "is no file that can be read"),
        ({"data": "notes.txt"}, "data", "suffixes"),
        ({"data": "text"}, "data", "neither a file here nor a data set of the Hub"),  # `datasets` reads the folder
        ({"data": "."}, "splits", "is a folder"),
        ({"prompt": "{text}"}, "prompt", "has no 'text'; it has reversed, word"),
        ({"prompt": "{word"}, "prompt", "single '{' at character 1"),
        ({"answer": "target"}, "answer", "has no 'target'"),
        ({"reward": "exactly"}, "reward", "unknown reward"),
        ({"reward": "no.such:function"}, "reward", "cannot import"),
        ({"reward": "json:__name__"}, "reward", "is no function"),
        ({"reward_params": {"ignore": True}}, "reward_params.ignore", "unknown key"),
        ({"reward": "regex", "reward_params": {"pattern": "("}}, "reward_params.pattern", "regular expression"),
        ({"splits": {"eval": "words.jsonl"}}, "splits", "names files of a folder"),
        ({"data": ".", "splits": {"eval": "words.jsonl"}}, "splits", "rows to train on"),
        ({"colour": 1}, "colour", "unknown key"),
    ],
)
def test_what_is_wrong_is_named(
    words: str, params: dict[str, Any], field: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(words).parent)
    Path("notes.txt").touch()
    with pytest.raises(InvalidRequest) as caught:
        load_source("dataset", {"data": "words.jsonl", **WORDS, **params}, 0)
    assert caught.value.field == f"environment.params.{field}"
    assert says in caught.value.text


@pytest.mark.parametrize("line", ["secret words", "[1]", '{"word": NaN}', "\xff"])
def test_a_line_that_is_no_object_is_named_and_not_shown(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"word": "a", "reversed": "a"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(InvalidRequest, match=r"a\.jsonl, line 3: no JSON object") as caught:
        source(str(path))
    assert line not in caught.value.text
