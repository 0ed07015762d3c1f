"""The `ebbtide` command as a person meets it: quick help, and errors in one line that name what is wrong."""

import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from ebbtide.cli.__main__ import app
from ebbtide.cli.commands.serve import SERVICES
from ebbtide.demo.coserving.coserving_options import CoservingOptions
from ebbtide.demo.demo import DemoOptions, demo_spec
from ebbtide.errors import InvalidRequest
from ebbtide.lab_commands.demo import demo, demo_coserving
from tests.fakes.scripted_settings import ENGINE

SPEC = """
name = "mine"
model = "nowhere"
[environment]
name = "reasoning_gym"
params = { dataset = "spell_backward" }
"""


def ebbtide(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ebbtide.cli", *words]
    plain = {"PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # the tree under test
    return subprocess.run(command, capture_output=True, text=True, check=False, env=plain | environment)


def test_help_names_every_command_and_is_quick() -> None:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import typer, rich.console, msgspec"], check=True)
    imports = time.monotonic() - began
    began = time.monotonic()
    done = ebbtide("--help")
    # Against what cannot be left out, so that a busy machine is no excuse and no obstacle; 0.25 s on an idle one.
    assert time.monotonic() - began < 3 * imports + 0.3
    assert done.returncode == 0
    listed = re.findall(r"^│ ([a-z][a-z-]*) ", done.stdout, re.MULTILINE)
    assert listed == [
        *("up", "base-model", "run", "worker", "serve", "demo", "simulate", "profile"),
        *("guard", "weights", "health", "tokens", "certs"),
    ]


@pytest.mark.parametrize(
    ("noun", "verbs"),
    [
        ("run", "submit list show watch cancel chat samples timeline weights usage push record"),
        ("worker", "list drain"),
        ("serve", " ".join(SERVICES)),
        ("demo", "agent coserving elastic"),
        ("weights", "export"),
        ("profile", "engine trainer"),
    ],
)
def test_help_of_a_noun_names_its_verbs(noun: str, verbs: str) -> None:
    assert re.findall(r"^│ ([a-z][a-z-]*) ", ebbtide(noun, "--help").stdout, re.MULTILINE) == verbs.split()


@pytest.mark.parametrize("former", ["submit", "runs", "workers", "coordinator", "demo-agent", "weights-export"])
def test_a_command_that_is_not_there_is_refused(former: str) -> None:
    done = ebbtide(former)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"No such command '{former}'" in done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, ebbtide.cli.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "vllm", "transformers", "matplotlib", "grpc", "numpy", "psutil", "uvloop"}
    assert heavy.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("view", ["fleet", "run", "tables", "timeline", "weights_screen"])
def test_a_view_imports_neither_the_sdk_nor_what_services_run_on(view: str) -> None:
    code = f"import sys, ebbtide.cli.views.{view}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"grpc", "numpy", "uvloop", "structlog", "matplotlib", "ebbtide.client", "ebbtide.environments"}
    assert heavy.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_gets_its_flags_and_refuses_unknown_ones_by_name(name: str) -> None:
    assert "--ready-file" in ebbtide("serve", name, "--help").stdout
    done = ebbtide("serve", name, "--no-such-flag")
    assert done.returncode == 2
    assert "--no-such-flag: unknown flag" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("steps = 3", "RUN.toml:4:1: steps: is unknown; known are name, model"),
        (
            "[trainer]\nlearning_rte = 1e-6",
            "RUN.toml:10:1: trainer.learning_rte: is unknown; did you mean learning_rate?",
        ),
        ("[trainer]\nsteps = 0", "RUN.toml:10:9: trainer.steps: is 0; it must be a whole number from 1"),
        ("[sampling]\ntemperature = nan", "RUN.toml:10:15: sampling.temperature: is nan; it must be a number from 0"),
        ("[trainer]\nmax_grad_norm = inf", "RUN.toml:10:17: trainer.max_grad_norm: is inf; it must be a number above"),
        ("[sampling]\ntop_p = 1.5", "RUN.toml:10:9: sampling.top_p: is 1.5; it must be a number above 0 and to 1"),
        ("[sampling]\nseed = 1", "RUN.toml:10:8: sampling.seed: not supported"),
        (
            "[lora]\nrank = 8",
            "RUN.toml:9:1: lora: LoRA adapters are not supported yet; merge the adapter into its base",
        ),
        ("oops", "RUN.toml:4:5: is no TOML: Expected '=' after a key"),
    ],
)
def test_a_bad_spec_is_refused_in_one_line_that_names_the_field(tmp_path: Path, change: str, said: str) -> None:
    head, _, tables = SPEC.partition("[environment]")
    first_table = change if change.startswith("[") else ""
    text = f"{head}{'' if first_table else change}\n[environment]{tables}\n{first_table}"
    (tmp_path / "RUN.toml").write_text(text)
    done = ebbtide("run", "submit", str(tmp_path / "RUN.toml"), "--no-check")
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_all_that_is_wrong_with_a_spec_is_told_at_once_and_what_to_do_about_a_model_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text(
        f"{SPEC.replace('nowhere', 'Qwen/Qwen3-8B')}[sampling]\nmin_tokens = 600\n[trainer]\nstep = 3\n"
    )
    done = ebbtide("run", "submit", str(tmp_path / "RUN.toml"), HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    first, second, third = done.stderr.replace(f"{tmp_path}/", "").splitlines()
    assert first.startswith("ebbtide: RUN.toml:3:9: model: 'Qwen/Qwen3-8B' is no directory; ")
    assert "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B, then give models/Qwen3-8B" in first
    assert second == "RUN.toml:8:14: sampling.min_tokens: must be at most max_tokens (512)"
    assert third == "RUN.toml:10:1: trainer.step: is unknown; did you mean steps?"


def test_without_a_token_it_is_told_where_to_put_one() -> None:
    done = ebbtide("run", "list")
    where = "set EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE; of a cluster of `ebbtide up`: `source runs/up/env`"
    assert (done.returncode, done.stderr) == (2, f"ebbtide: token: is required: {where}\n")


def test_a_token_file_that_is_not_there_is_named() -> None:
    done = ebbtide("run", "list", "--token-file", "no/such/file")
    assert done.returncode == 2
    assert "--token-file: 'no/such/file' cannot be read" in done.stderr


def test_a_token_file_that_holds_no_text_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(bytes(range(256)))
    done = ebbtide("run", "list", "--token-file", str(tmp_path / "token"))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "token: must be printable ASCII" in done.stderr


def test_a_duration_that_is_none_is_refused_before_anybody_is_asked() -> None:
    done = ebbtide("worker", "drain", "worker-1", "--within", "soon")
    assert (done.returncode, done.stderr) == (
        2,
        "ebbtide: --within: 'soon' is no duration: write 30, 30s, 2m or 1h\n",
    )


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "worker.toml").write_text(f'engine = "{ENGINE}"\n')
    words = ["--model", str(tmp_path), "--worker-config", str(tmp_path / "worker.toml")]
    done = ebbtide("up", *words, "--run-dir", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr == f"ebbtide: {tmp_path}/file: cannot be written (File exists); name another\n"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("/nope", "'/nope' is no directory; give the path of a local checkpoint"),
        ("Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B, then give models/Qwen3-8B"),
        (".", " is no checkpoint directory: it has no config.json"),
    ],
)
def test_a_model_that_no_worker_would_boot_from_is_refused_before_anything_boots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ebbtide("up", "--model", model, "--run-dir", str(tmp_path / "up"), HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stderr.startswith("ebbtide: --model: ")
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_worker_settings_with_a_slip_are_refused_before_anything_boots(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text("slotz = 3\n")
    done = ebbtide("up", "--model", ".", "--worker-config", str(tmp_path / "worker.toml"))
    assert (done.returncode, done.stderr) == (
        2,
        f"ebbtide: {tmp_path}/worker.toml: slotz: unknown key; did you mean slots?\n",
    )


def test_ranks_in_a_trainers_file_that_are_not_the_clusters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text(f'engine = "{ENGINE}"\n')
    (config := tmp_path / "trainer.toml").write_text("ranks = 8\n")
    words = ["--model", str(tmp_path), "--worker-config", str(tmp_path / "worker.toml")]
    done = ebbtide("up", *words, "--trainer-config", str(config), "--ranks", "2", "--run-dir", str(tmp_path / "up"))
    told = "ranks is 8, and --ranks 2: leave it out of the file, and give --ranks"
    assert (done.returncode, done.stderr) == (2, f"ebbtide: --trainer-config: {told}\n")


def test_the_demos_options_change_the_demos_spec(tmp_path: Path) -> None:
    options = DemoOptions(run_dir=tmp_path, seed=5, steps=7, control=True, temperature=0.7, top_p=0.9, eval_problems=9)
    spec = demo_spec(options)
    assert (spec.seed, spec.trainer.steps, spec.evaluation.problems) == (5, 7, 9)
    assert (spec.sampling.temperature, spec.sampling.top_p) == (0.7, 0.9)
    assert spec.trainer.permute_rewards
    assert not demo_spec(DemoOptions()).trainer.permute_rewards
    streamed, plain = (demo_spec(DemoOptions(streaming=given)).trainer for given in (True, False))
    assert [(one.streaming, one.minibatches) for one in (streamed, plain)] == [(True, 1), (False, 4)]


def test_the_demo_asks_for_as_many_unseen_problems_and_tokens_as_it_promises() -> None:
    spec = demo_spec(DemoOptions())
    assert spec.evaluation.problems >= 300
    assert spec.batch.max_staleness == 0


def test_an_option_out_of_range_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling\.top_p: "):
        demo_spec(DemoOptions(top_p=2.0))


def test_every_option_of_the_demo_reaches_it() -> None:
    flags = set(demo.__annotations__) - {"return", "context", "kill"} | {"kill_worker"}
    assert flags == set(DemoOptions.__struct_fields__)


def test_every_option_of_the_demo_beside_a_served_model_reaches_it() -> None:
    assert set(demo_coserving.__annotations__) - {"return"} == set(CoservingOptions.__struct_fields__)


def test_an_option_before_the_name_of_a_demo_is_refused(tmp_path: Path) -> None:
    done = ebbtide("demo", "--run-dir", str(tmp_path), "agent")
    assert done.returncode == 2
    assert "--run-dir: comes before agent; options of a demo follow its name" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("window", ["1:", "5:2", "a:b", "-1:3", "0:inf", "7"])
def test_a_window_that_is_none_is_refused_before_anything_is_started(tmp_path: Path, window: str) -> None:
    done = ebbtide("demo", "coserving", "--run-dir", str(tmp_path), f"--window={window}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"ebbtide: --window: {window!r} is no window")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["engine", "--model", ".", "--out", "speeds.txt"], "--out: must end with .toml"),
        (["engine", "--model", ".", "--out", "nowhere/speeds.toml"], "--out: the folder nowhere does not exist"),
        (["engine", "--model", ".", "--out", "speeds.toml", "--slotz", "4"], "--slotz: unknown flag; did you mean"),
        (["engine", "--model", ".", "--out", "speeds.toml", "--engine", ENGINE], "engine: only vllm can be"),
        (["trainer", "--config", "none.toml", "--out", "speeds.toml"], "none.toml: cannot be read"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_minutes_are_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        app(["profile", *words], standalone_mode=False)


def test_it_tells_its_version() -> None:
    done = ebbtide("--version")
    assert (done.returncode, done.stdout) == (0, f"ebbtide {version('ebbtide')}\n")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["run"],
        ["run", "list"],
        ["demo"],
        ["demo", "agent"],
        ["guard"],
        ["guard", "status"],
        ["profile", "engine"],
        ["certs", "show"],
    ],
    ids=str,
)
def test_h_is_help_everywhere(words: list[str]) -> None:
    short, long = ebbtide(*words, "-h"), ebbtide(*words, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert "usage:" in short.stdout.lower()


def test_a_shell_can_complete_its_commands() -> None:
    asked = {"_EBBTIDE_COMPLETE": "complete_bash", "COMP_WORDS": "ebbtide run sub", "COMP_CWORD": "2"}
    assert ebbtide(**asked).stdout == "submit\n"
    chosen = ebbtide("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_EBBTIDE_COMPLETE=complete_bash" in chosen.stdout
    assert "--install-completion" in ebbtide("--help").stdout


def test_json_excludes_watching() -> None:
    done = ebbtide("worker", "list", "--watch", "--json", EBBTIDE_TOKEN="t")
    assert (done.returncode, done.stderr) == (2, "ebbtide: --json: excludes --watch; call it again and again\n")
