"""Scenarios are read whole, or refused with each problem's place and a remedy."""

import os
from pathlib import Path

import pytest
from msgspec import Struct

from ebbtide.checked_files import MOST_PROBLEMS, FileRefused
from ebbtide.simulator.scenario.quantity_spec import LengthSpec
from ebbtide.simulator.scenario.scenario import is_path
from ebbtide.simulator.scenario.scenario_checks import EngineLimits, KnownNames
from ebbtide.simulator.scenario.scenario_reader import parse_scenario, read_scenario
from tests.unit.simulator.scenario.scenario_texts import FULL, SHORT, problems, scenario, write_tables

EXAMPLES = Path(__file__).parents[4] / "examples" / "scenarios"
AT = Path("s.toml")


def test_ten_lines_are_a_scenario() -> None:
    made = scenario(SHORT)
    assert (made.until_s, made.fleet[0].workers, made.run[0].rollouts_per_step) == (7200.0, 6, 1024)


def test_everything_that_a_scenario_can_state_is_read(tmp_path: Path) -> None:
    made = parse_scenario(FULL, write_tables(tmp_path))
    assert [pool.name for pool in made.fleet] == ["spot", "nodes", "borrowed", "own"]
    assert made.fleet[2].grants is not None
    assert made.tables.grants[made.fleet[2].grants.file].shares == (0.5, 0.0, 1.0)
    assert made.run[0].environment.reward_s.value == 0.5
    assert made.run[1].lengths == LengthSpec(value=900)
    assert [made.steps_of(run) for run in made.run] == [20, 50]
    assert made.tables.spots.keys() == {"counts.csv", "events.csv"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    assert read_scenario(path).run


#: A part of the short scenario, what stands there instead, and what is told of it.
WRONG = [
    ("hours = 2.0", "hours = 0", "2:9: hours: is 0; it must be a number above 0 and to 1000"),
    ("hours = 2.0", "huors = 2.0", "2:1: huors: is unknown; did you mean hours?"),
    ("hours = 2.0\n", "", "8:1: run[0].steps: nothing ends this run; state hours or steps"),
    ("workers = 6", "workers = 6.5", "7:11: fleet[0].workers: is 6.5; it must be a whole number from 1 to"),
    ("workers = 6", "", "4:1: fleet[0].workers: state one of workers and trace"),
    (
        "workers = 6",
        "workers = 6\nkind = 'spit'",
        "8:8: fleet[0].kind: is 'spit'; it must be one of reserved, spot, borr",
    ),
    ("workers = 6", "workers = 6\nkind = 'spit'", "trainer; did you mean spot?"),
    (
        "workers = 6",
        "workers = 6\nkind = 'borrowed'",
        "4:1: fleet[0].grants: hosts lend borrowed machines for a while; name a file",
    ),
    ("workers = 6", "workers = 6\nprices = 'p.csv'", "8:10: fleet[0].prices: 'p.csv' cannot be read (No such file or"),
    ("workers = 6", "workers = 6\nslots = 1e400", "8:9: fleet[0].slots: is inf; it must be a whole number from 1 to"),
    ('"math"', '"ma th"', "10:8: run[0].name: is 'ma th'; it must be 1 to 64 of A-Z a-z 0-9 _ -"),
    ('trainer = "large"', "", "9:1: run[0].trainer: is missing; add it, a text in quotes with 1 to"),
    (
        '"large"',
        '"large"\nlengths = { mean = 9, meen = 3 }',
        "12:23: run[0].lengths.meen: is unknown; did you mean mean?",
    ),
    (
        '"large"',
        '"large"\nlengths = { mean = 9, median = 3 }',
        "12:32: run[0].lengths.median: both median and mean set",
    ),
    ('"large"', '"large"\nlengths = { mean = 90000 }', "12:20: run[0].lengths.mean: must be between 0 and 16384"),
    ('"large"', '"large"\nprompts = 100_000\ngroup = 4096', "12:11: run[0].prompts: a step has 409600000 rollouts"),
    ("[[run]]", "[run]", "9:1: run: is a table; it must be an array of tables"),
    ('"six machines"', '"six', "1:12: is no TOML: Illegal character '\\n'; texts of several lines"),
    ("hours = 2.0", "hours = two", "2:9: is no TOML: Invalid value; texts stand in quotes"),
    (
        "workers = 6",
        "workers = 6\nworkers = 7",
        "8:12: is no TOML: Cannot overwrite a value; the key stands there twice",
    ),
]
FAULT = SHORT + "[[fault]]\nkind = 'kill'\nat_s = 1\n"


@pytest.mark.parametrize(("old", "new", "told"), WRONG)
def test_a_problem_is_told_with_its_place_and_a_remedy(old: str, new: str, told: str) -> None:
    assert old in SHORT
    (problem,) = problems(SHORT.replace(old, new, 1), AT)
    assert told in str(problem)
    assert str(problem).startswith("s.toml:")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("pool = 'spto'", "15:8: fault[0].pool: there is no pool 'spto'; did you mean spot?"),
        ("machines = 7", "15:12: fault[0].machines: must be at most the 6 machines of the pool 'spot'"),
        ("run = 'maths'", "15:7: fault[0].run: there is no run 'maths'; did you mean math?"),
        ("speed = 0.001", "15:9: fault[0].speed: is 0.001; it must be a number from 0.01 to 1"),
        ("at = 3", "15:1: fault[0].at: is unknown; did you mean at_s?"),
    ],
)
def test_a_fault_befalls_what_there_is(more: str, told: str) -> None:
    assert [str(problem) for problem in problems(FAULT + more, AT)] == [f"s.toml:{told}"]


def test_all_problems_of_a_pass_are_told_at_once() -> None:
    wrong = SHORT.replace("2.0", '"two"').replace("workers = 6", "workers = -1").replace("trainer", "trianer")
    assert [(one.line, one.field) for one in problems(wrong, AT)] == [
        (2, "hours"), (7, "fleet[0].workers"), (9, "run[0].trainer"), (11, "run[0].trianer"),
    ]  # fmt: skip


def test_a_long_list_of_problems_ends() -> None:
    wrong = SHORT + "".join(f"key{index} = 1\n" for index in range(50))
    with pytest.raises(FileRefused, match="further problems are not listed") as refused:
        parse_scenario(wrong, AT)
    assert len(refused.value.problems) == MOST_PROBLEMS


def test_names_of_profiles_and_policies_are_checked_against_those_that_there_are(tmp_path: Path) -> None:
    class Params(Struct, kw_only=True):
        eta: float = 1.25

    def problem(kind: str, name: str, folder: Path) -> str:
        assert folder == tmp_path
        return f"is a bad {kind} profile" if name in {"large", "./bad.toml"} else ""

    known = KnownNames(profile_problem=problem, policies={"ebbtide": Params})
    text = (
        SHORT.replace('engine = "small"', 'engine = "./own.toml"')
        + '[policy]\nname = "ebbtide"\nparams = { etta = 1 }\n'
    )
    with pytest.raises(FileRefused) as refused:
        parse_scenario(text, tmp_path / "s.toml", known)
    assert [problem.text for problem in refused.value.problems] == [
        f"there is no file {tmp_path / 'own.toml'}; check the path",
        "is a bad trainer profile",
        "is unknown; did you mean eta?",
    ]
    for name in ("own", "bad"):
        (tmp_path / f"{name}.toml").touch()
    good = text.replace("etta", "eta").replace('"large"', '"largest"')
    assert [str(one) for one in problems(good.replace("own", "bad"), tmp_path / "s.toml", known)] == [
        f"{tmp_path / 's.toml'}:6:10: fleet[0].engine: is a bad engine profile"
    ]
    made = parse_scenario(good, tmp_path / "s.toml", known)
    assert (is_path(made.fleet[0].engine), is_path(made.run[0].trainer)) == (True, False)


def test_a_model_and_its_gpus_may_stand_in_place_of_a_profiles_name() -> None:
    text = SHORT.replace('"small"', '{ model = "Qwen3-14B", gpu = "H100", tp = 2 }')
    text = text.replace('"large"', '{ model = "Qwen3-14B", gpu = "H100", gpus = 8 }')
    made = scenario(text)
    assert (made.fleet[0].engine, made.run[0].trainer) == ("h100x2-qwen3-14b", "h100x8-qwen3-14b")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            '"small"',
            "{ model = 'Qwen3-14B', gpu = 'H100', tp = 9 }",
            "fleet[0].engine.tp: is 9; it must be a whole",
        ),
        ('"small"', "{ model = 'Qwen3-14B', gpus = 2 }", "6:33: fleet[0].engine.gpus: is unknown; did you mean gpu?"),
        ('"large"', "{ model = 'Qwen3-14B', gpu = 'H100' }", "11:11: run[0].trainer.gpus: is missing; add it"),
        (
            '"small"',
            "2",
            "6:10: fleet[0].engine: is 2; it must be a text in quotes with 1 to 1024 characters, or",
        ),
    ],
)
def test_a_model_on_gpus_is_checked_key_by_key(old: str, new: str, told: str) -> None:
    found = [str(problem) for problem in problems(SHORT.replace(old, new), AT)]
    assert any(told in one for one in found), found


class TestWhatNoSimulationCouldEnd:
    LIMITS = EngineLimits(kv_tokens=16_880, sequences=100, batched_tokens=80)
    KNOWN = KnownNames(
        policies={"ebbtide": Struct, "alone": Struct},
        single_run=frozenset({"alone"}),
        engine_limits=lambda _name, _folder: TestWhatNoSimulationCouldEnd.LIMITS,
    )

    @pytest.mark.parametrize(
        ("old", "new", "told"),
        [
            (
                '"large"',
                '"large"\nprompt_tokens = 498',
                "6:10: fleet[0].engine: its kv.tokens hold 16880 tokens, and a rollout of run 'math' may have 16882",
            ),
            ('"large"', '"large"\ncap = 900\nenvironment = { turns = 16 }', "6:10: fleet[0].engine: its kv.tokens"),
            ("workers = 6", "workers = 6\nslots = 81", "8:9: fleet[0].slots: must be at most 80, the batched_tokens"),
        ],
    )
    def test_engines_that_cannot_hold_the_work_are_told(self, old: str, new: str, told: str) -> None:
        small = SHORT.replace('"large"', '"large"\ncap = 16_000') if old != '"large"' else SHORT
        (problem,) = problems(small.replace(old, new), AT, self.KNOWN)
        assert f"s.toml:{told}" in str(problem)

    @pytest.mark.parametrize("more", ["prompt_tokens = 497", "cap = 900", "context = 16_880", "lengths = 9"])
    def test_work_that_just_fits_is_read(self, more: str) -> None:
        assert not problems(SHORT + more, AT, self.KNOWN)

    def test_a_policy_that_knows_one_run_gets_one(self) -> None:
        two = SHORT + "cap = 900\n[[run]]\nname = 'code'\ntrainer = 'large'\ncap = 900\n"
        (problem,) = problems(two + "[policy]\nname = 'alone'\n", AT, self.KNOWN)
        assert str(problem).startswith(
            "s.toml:18:8: policy.name: 'alone' knows one run, and there are 2; choose ebbtide"
        )
        assert not problems(two + "[policy]\nname = 'ebbtide'\n", AT, self.KNOWN)

    def test_a_trainers_engines_alone_have_no_window(self) -> None:
        lent = SHORT.replace("workers = 6", "workers = 6\nkind = 'trainer'\nwindow_s = 60")
        (problem,) = problems(lent, AT)
        assert str(problem).startswith("s.toml:9:12: fleet[0].window_s: no other engines end a step")
        assert not problems(lent.replace("window_s = 60", ""), AT)
        assert not problems(lent + "[[fleet]]\nname = 'more'\nengine = 'small'\nworkers = 1\n", AT)


class TestExtending:
    def test_keys_of_the_file_itself_go_first(self, tmp_path: Path) -> None:
        (tmp_path / "base.toml").write_text(SHORT)
        made = parse_scenario('extends = "base.toml"\nhours = 5\nname = "longer"', tmp_path / "s.toml")
        assert (made.name, made.hours, made.fleet[0].workers) == ("longer", 5, 6)

    def test_a_problem_is_told_in_the_file_that_has_it(self, tmp_path: Path) -> None:
        (tmp_path / "base.toml").write_text(SHORT.replace("workers = 6", "workers = 0"))
        found = problems('extends = "base.toml"\nhours = -5', tmp_path / "s.toml")
        assert [(Path(one.file).name, one.line) for one in found] == [("base.toml", 7), ("s.toml", 2)]

    @pytest.mark.parametrize(
        ("base", "told"),
        [
            ("s.toml", "goes in a circle"),
            ("a.toml", "goes in a circle (s.toml -> a.toml -> s.toml)"),
            ("none.toml", "cannot be read"),
            ("../a.toml", "same folder"),
            ("0.toml", "chain of more than 8 files"),
        ],
    )
    def test_what_leads_nowhere_is_refused(self, tmp_path: Path, base: str, told: str) -> None:
        (tmp_path / "a.toml").write_text('extends = "s.toml"\n')
        for index in range(9):
            (tmp_path / f"{index}.toml").write_text(f'extends = "{index + 1}.toml"\n')
        text = f'extends = "{base}"\n' + SHORT
        (tmp_path / "s.toml").write_text(text)
        (found,) = problems(text, tmp_path / "s.toml")
        assert told in found.text
        assert found.line == 1


class TestFiles:
    @pytest.mark.parametrize("name", ["/dev/zero", ".", "pipe"])
    def test_what_is_no_regular_file_is_refused_without_reading_it(self, tmp_path: Path, name: str) -> None:
        os.mkfifo(tmp_path / "pipe")
        (found,) = problems(SHORT.replace("workers = 6", f'trace = "{name}"'), tmp_path / "s.toml")
        assert (found.line, found.column, found.field) == (7, 9, "fleet[0].trace.file")
        assert "no regular file" in found.text

    @pytest.mark.parametrize(
        ("data", "place", "told"),
        [
            (SHORT.encode("utf-16"), (1, 0), "UTF-16"),
            (SHORT.replace("six", "h\xe9").encode("latin-1"), (1, 10), "UTF-8"),
            (SHORT.replace("small", "sm\0all").encode(), (6, 13), "NUL"),
            (b"#" * 50_000, (0, 0), "larger than"),
        ],
    )
    def test_odd_bytes_are_refused_by_their_place(
        self, tmp_path: Path, data: bytes, place: tuple[int, int], told: str
    ) -> None:
        (tmp_path / "s.toml").write_bytes(data)
        with pytest.raises(FileRefused) as refused:
            read_scenario(tmp_path / "s.toml")
        (found,) = refused.value.problems
        assert (found.line, found.column, told in found.text) == (*place, True)

    def test_a_byte_order_mark_and_carriage_returns_do_no_harm(self, tmp_path: Path) -> None:
        (tmp_path / "s.toml").write_bytes(b"\xef\xbb\xbf" + SHORT.replace("\n", "\r\n").encode())
        assert read_scenario(tmp_path / "s.toml") == parse_scenario(SHORT, tmp_path / "s.toml")
