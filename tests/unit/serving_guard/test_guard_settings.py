"""Bad settings name the field and the remedy."""

from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets
from ebbtide.serving_guard.settings import GuardSettings, Slo, read_slos
from ebbtide.settings import read


def settings(*flags: str) -> GuardSettings:
    return read(GuardSettings, prog="ebbtide serve serving-guard", argv=["--grant-dir", "g", *flags], environ={})


@pytest.mark.parametrize(
    ("flags", "field", "remedy"),
    [
        (("--ttft-ms", "100", "--ttft-factor", "2"), "ttft_factor", "leave one out"),
        (("--tpot-ms", "100", "--tpot-factor", "2"), "tpot_factor", "leave one out"),
        (("--ttft-factor", "0.5"), "ttft_factor", "1 or more"),
        (("--upstream", "localhost:8000"), "upstream", "http://127.0.0.1:8000"),
        (("--metrics-url", "http://h/metrics"), "metrics_url", "observe"),
        (("--hold-ms", "900"), "hold_ms", "max_hold_s"),
        (("--upstream", "https://h"), "upstream", "http://127.0.0.1:8000"),
        (("--mode", "observe", "--slo-file", "/dev/null"), "slo_file", "flags"),
        (("--mode", "observe", "--tpot-ms", "20"), "ttft_ms", "milliseconds"),
        (("--mode", "observe", "--ttft-ms", "200", "--tpot-factor", "2"), "tpot_ms", "milliseconds"),
        (("--trainer-give-up", "weights"), "trainer.give_up", "set owner = trainer, or leave it out"),
        (("--owner", "trainer", "--ttft-ms", "200"), "ttft_ms", "set owner = server, or leave it out"),
        (("--owner", "trainer", "--proxy-drain-s", "5"), "proxy.drain_s", "set owner = server, or leave it out"),
    ],
)
def test_what_cannot_work_is_refused_by_name(flags: tuple[str, ...], field: str, remedy: str) -> None:
    with pytest.raises(InvalidRequest, match=remedy) as refused:
        settings(*flags).checked()
    assert refused.value.field == field


def test_what_each_owner_reads_is_not_refused() -> None:
    settings("--owner", "trainer", "--trainer-give-up", "nothing", "--kill-s", "3", "--metrics-port", "0").checked()
    settings("--ttft-ms", "200", "--kill-s", "3", "--metrics-port", "0").checked()


def test_an_engine_that_is_only_observed_may_be_behind_https() -> None:
    settings("--mode", "observe", "--ttft-ms", "200", "--tpot-ms", "20", "--upstream", "https://h").checked()


def test_a_target_is_absolute_or_a_factor() -> None:
    targets = settings("--ttft-ms", "250", "--tpot-factor", "2").targets()[""]
    assert (targets.ttft_s, targets.tpot_s, targets.tpot_factor) == (0.25, 0.0, 2.0)


def test_the_file_overrides_the_flags_for_its_models_alone(tmp_path: Path) -> None:
    path = tmp_path / "slo.toml"
    path.write_text('["org/big"]\nttft_factor = 3\naim_tpot = 0.5\n')
    made = settings("--ttft-ms", "250", "--tpot-ms", "50", "--slo-file", str(path)).targets()
    assert (made[""].ttft_s, made[""].aim_tpot) == (0.25, LatencyTargets().aim_tpot)
    assert (made["org/big"].ttft_s, made["org/big"].ttft_factor) == (0.0, 3.0)
    assert (made["org/big"].tpot_s, made["org/big"].aim_tpot) == (0.05, 0.5)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[m]\nttft = 3\n", "m.ttft"),
        ("[m]\nttft_ms = -1\n", "m.ttft_ms"),
        ("[m]\nttft_ms = 5\nttft_factor = 2\n", "m.ttft_factor"),
        ("m = 3\n", "m"),
        ("[m\n", ""),
    ],
)
def test_the_file_names_model_and_key_of_what_is_wrong(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "slo.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        read_slos(path, Slo())
    assert str(path) in refused.value.field
    assert refused.value.field.endswith(field)
