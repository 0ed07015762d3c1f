"""The picture of simulated scenarios: the same bytes each time, bounded, and drawn of nothing too."""

import struct
from pathlib import Path

from msgspec.structs import replace

from ebbtide.simulator.outcome import Span
from ebbtide.simulator.outcome_picture import write_outcome_picture
from tests.fakes.simulated_outcomes import empty_outcome, outcome


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_the_same_outcomes_give_the_same_picture_and_others_another(tmp_path: Path) -> None:
    for name, drawn in (("a", [outcome(), empty_outcome()]), ("b", [outcome(), empty_outcome()]), ("c", [outcome(1)])):
        write_outcome_picture(drawn, tmp_path / name)
    first = (tmp_path / "a").read_bytes()
    assert first == (tmp_path / "b").read_bytes()
    assert first != (tmp_path / "c").read_bytes()
    assert b"matplotlib" not in first.lower()


def test_thousands_of_machines_make_a_picture_of_bounded_size(tmp_path: Path) -> None:
    spans = [
        Span(machine=f"m{number}", pool="spot", state=state, begin_s=at, end_s=at + 900.0, run="math")
        for number in range(2000)
        for at, state in ((0.0, "booting"), (900.0, "generating"), (1800.0, "held"), (2700.0, "unheard of"))
    ]
    write_outcome_picture([replace(outcome(), spans=spans)], tmp_path / "big.png")
    width, height = size(tmp_path / "big.png")
    assert width == 14 * 120
    assert height < 12 * 120
