"""Tables are read as they are, and refused by line, column and remedy."""

from itertools import pairwise
from math import exp, floor, log, pi, sin
from pathlib import Path
from statistics import mean, median

import pytest

from ebbtide.checked_files.refusals import MOST_PROBLEMS, FileRefused
from ebbtide.simulator.scenario.draws.served_recording import ServedArrival, ServedRecording, served_recording
from ebbtide.simulator.scenario.inputs.pace_table import read_paces
from ebbtide.simulator.scenario.inputs.price_table import fixed_price, read_prices
from ebbtide.simulator.scenario.inputs.quantile_table import read_quantiles
from ebbtide.simulator.scenario.inputs.served_trace import ServedTrace, read_served_trace
from ebbtide.simulator.scenario.inputs.spot_trace import read_spot_trace
from ebbtide.simulator.scenario.machine_pool import ServingSpec

EXAMPLES = Path(__file__).parents[4] / "examples" / "scenarios"
READERS = {
    "spot": read_spot_trace, "quantiles": read_quantiles, "prices": read_prices, "served": read_served_trace,
    "paces": read_paces,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("spot", "t_s,event\n0,add\n", "1: node: is no column; the table has 't_s,event' and needs 't_s,event,node'"),
        ("spot", "t_s,count\n0,1\n5,two\n", "3:3: count: is 'two'; it must be a number from 0 to 20000"),
        ("spot", "t_s,count\n0,1\n5,1.5\n", "3:3: count: is 1.5; it must be a whole number"),
        ("spot", "t_s,count\n5,1\n0,2\n", "3:1: t_s: is 0 after 5; rows must be sorted by t_s"),
        ("spot", "t_s,count\n0,0\n5,0\n", "1: no machine ever joins; there is nothing to simulate"),
        ("spot", "t_s,count\nnan,1\n", "2:1: t_s: is 'nan'; it must be a number from 0 to 100000000"),
        ("spot", "t_s,count\n-1,1\n", "2:1: t_s: is '-1'; it must be a number from 0 to 100000000"),
        ("spot", "t_s,count\n0,1,2\n", "2: has 3 cells; the head has 2 columns; the row must have as many"),
        ("spot", "t_s,event,node\n0,ad,a\n", "2:3: event: is 'ad'; it must be add or remove"),
        ("spot", "t_s,event,node\n0,add,a\n1,add,a\n", "3:7: node: 'a' joins, but is there already; correct"),
        ("spot", "t_s,event,node\n0,remove,a\n", "2:10: node: 'a' leaves, but is not there; correct"),
        ("spot", "t_s,event,node\n0,add,a b\n", "2:7: node: is 'a b'; it must be 1 to 64 of"),
        ("spot", "# nothing\n\n", "1: has no rows; it must be a table with a head and at least one row"),
        ("spot", "t_s,count,t_s\n0,1,2\n", "1: t_s: the table has this column twice; take one out"),
        ("quantiles", "quantile,apples\n0,1\n", "1: has columns 'quantile,apples'; the values' column must be one of"),
        ("quantiles", "quantile,cdf,tokens\n0,1,2\n", "1: has columns 'quantile,cdf,tokens'; the shares' column"),
        ("quantiles", "quantile,tokens\n0.5,9\n", "1: has one share alone; it needs values at two"),
        ("quantiles", "quantile,tokens\n0,9\n1,8\n", "3:3: tokens: is 8 after 9; rows must be sorted by tokens"),
        ("quantiles", "quantile,tokens\n0,9\n1.1,10\n", "3:1: quantile: is '1.1'; it must be a number from 0 to 1"),
        ("prices", "t_s,dollars_per_hour\n0,1\n0,2\n", "3:1: t_s: is 0 after 0; rows must be sorted by t_s"),
        ("paces", "t_s,pace\n60,1\n", "2:1: t_s: must be 0 in the first row"),
        ("paces", "t_s,pace\n0,1\n90000,1\n", "3:1: t_s: is '90000'; it must be a number from 0 to 86400"),
        ("served", 't_s,input_tokens,output_tokens\n0,"1\n', "2: unexpected end of data; it must be a table"),
    ],
)
def test_a_bad_table_is_refused_by_line_column_and_remedy(tmp_path: Path, kind: str, text: str, told: str) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(FileRefused) as refused:
        READERS[kind](tmp_path / "table.csv", "table.csv")
    (problem,) = refused.value.problems
    assert str(problem).startswith(f"table.csv:{told}")


def test_all_bad_cells_are_told_at_once_up_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("t_s,dollars_per_hour\nx,1\n2,-1\n")
    with pytest.raises(FileRefused) as refused:
        read_prices(tmp_path / "t.csv", "t.csv")
    assert [(one.line, one.column, one.field) for one in refused.value.problems] == [
        (2, 1, "t_s"), (3, 3, "dollars_per_hour"),
    ]  # fmt: skip
    (tmp_path / "t.csv").write_text("t_s,dollars_per_hour\n" + "x,1\n" * 100)
    with pytest.raises(FileRefused) as refused:
        read_prices(tmp_path / "t.csv", "t.csv")
    assert len(refused.value.problems) == MOST_PROBLEMS


def test_comments_blank_lines_and_quotes_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b'# a\r\n"t_s", dollars_per_hour \r\n\r\n# b\r\n0, "2.5"\r\n')
    with pytest.raises(FileRefused, match=r"t\.csv:5:3: dollars_per_hour: is"):
        read_prices(tmp_path / "t.csv", "t.csv")
    (tmp_path / "t.csv").write_bytes(b'# a\r\n"t_s", dollars_per_hour \r\n\r\n# b\r\n0,"2.5"\r\n')
    assert read_prices(tmp_path / "t.csv", "t.csv").dollars_per_hour == (2.5,)


def test_prices_hold_until_the_next_one_and_the_first_also_before(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("t_s,dollars_per_hour\n3600,2\n7200,6\n")
    table = read_prices(tmp_path / "t.csv", "t.csv")
    assert table.cost(0, 3600) == pytest.approx(2)
    assert table.cost(0, 14_400) == pytest.approx(2 + 2 + 6 + 6)
    assert table.cost(7000, 7400) == pytest.approx((200 * 2 + 200 * 6) / 3600)
    assert table.cost(10_800, 10_800) == table.cost(5, 4) == 0.0
    assert sum(table.cost(at, at + 100) for at in range(0, 14_400, 100)) == pytest.approx(table.cost(0, 14_400))
    assert fixed_price(8.0).cost(100, 1000) == pytest.approx(2.0)


TRACE = ServedTrace((10.0, 10.0, 12.0, 40.0), (100, 200, 300, 400), (10, 20, 30, 40))


def recording(spec: ServingSpec, seed: int = 0) -> ServedRecording:
    return served_recording(spec, {"t.csv": TRACE}, "b", seed)


def test_served_requests_are_those_of_their_window_scaled() -> None:
    spec = ServingSpec(file="t.csv", start_s=10, span_s=20, load=2.0, output_scale=0.5, longest_prompt=250)
    assert recording(spec) == ServedRecording(
        (ServedArrival(0.0, 100, 5), ServedArrival(0.0, 200, 10), ServedArrival(1.0, 250, 15)), 10.0
    )


def test_a_whole_trace_begins_again_a_mean_gap_after_its_end() -> None:
    found = recording(ServingSpec(file="t.csv"))
    assert [one.at_s for one in found.requests] == [10.0, 10.0, 12.0, 40.0]
    assert found.seconds == pytest.approx(40.0 * 4 / 3)
    assert recording(ServingSpec(file="t.csv", start_s=40)).seconds == 1.0


def test_made_up_requests_have_their_rate_bursts_and_lengths() -> None:
    spec = ServingSpec(requests_per_s=5.0, burst=8.0, burst_gap_s=0.05, load=2.0, prompt_tokens=700, output_tokens=90)
    found = recording(spec)
    times = [one.at_s for one in found.requests]
    assert (times == sorted(times), found.seconds, times[-1] < found.seconds) == (True, 1800.0, True)
    assert len(times) / found.seconds == pytest.approx(10.0, rel=0.05)
    gaps = [after - before for before, after in pairwise(times)]
    assert median(gaps) < 0.5 * mean(gaps)
    assert median(one.prompt for one in found.requests) == pytest.approx(700, rel=0.03)
    assert median(one.output for one in found.requests) == pytest.approx(90, rel=0.03)
    assert recording(spec) == found != recording(spec, seed=1)


class TestExampleTables:
    """The tables of the examples are what the formulas in them say."""

    def test_spot_machines(self) -> None:
        counts = [(600.0 * i, max(0, floor(6 + 4 * sin(2 * pi * i / 36) + 3 * sin(2 * pi * i / 7)))) for i in range(72)]
        kept = [pair for before, pair in pairwise([(0.0, -1), *counts]) if pair[1] != before[1]]
        assert list(read_spot_trace(EXAMPLES / "spot_machines.csv", "").counts) == kept
        assert min(count for _, count in kept) == 0

    def test_spot_prices(self) -> None:
        prices = [round(5.32 * (1 + 0.2 * sin(2 * pi * i / 24)), 2) for i in range(24)]
        found = read_prices(EXAMPLES / "spot_prices.csv", "")
        assert (list(found.dollars_per_hour), list(found.times_s)) == (prices, [3600.0 * i for i in range(24)])

    def test_served_requests(self) -> None:
        found = read_served_trace(EXAMPLES / "served_requests.csv", "")
        at_s = 0.0
        for i, (time_s, prompt, output) in enumerate(zip(found.times_s, found.prompts, found.outputs, strict=True)):
            at_s += (0.15 if i % 8 else 4.0) * -log(1 - i * 0.618033988749895 % 1)
            assert time_s == pytest.approx(at_s, abs=0.001)
            assert prompt == round(600 * exp(1.1 * (2 * (i * 0.754877666246693 % 1) - 1)))
            assert output == round(90 * exp(1.2 * (2 * (i * 0.569840290998053 % 1) - 1)))
        assert len(found.times_s) == 800
