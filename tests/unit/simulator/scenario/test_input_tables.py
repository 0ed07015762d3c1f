"""Tables are read as they are, and refused by line, column and remedy."""

from itertools import islice, pairwise
from math import floor, pi, sin
from pathlib import Path

import pytest

from ebbtide.checked_files import MOST_PROBLEMS, FileRefused
from ebbtide.simulator.scenario.input_tables import (
    fixed_price,
    read_grants,
    read_prices,
    read_quantiles,
    read_spot_trace,
)

EXAMPLES = Path(__file__).parents[4] / "examples" / "scenarios"
READERS = {
    "spot": read_spot_trace, "quantiles": read_quantiles, "prices": read_prices, "grants": read_grants,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("spot", "t_s,event\n0,add\n", "1: node: is no column; the table has 't_s,event' and needs 't_s,event,node'"),
        ("spot", "t_s,count\n0,1\n5,two\n", "3:3: count: is 'two'; it must be a whole number from 0 to 20000"),
        ("spot", "t_s,count\n0,1\n5,1.5\n", "3:3: count: is '1.5'; it must be a whole number"),
        ("spot", "t_s,count\n5,1\n0,2\n", "3:1: t_s: is 0 after 5; rows must be sorted by t_s"),
        ("spot", "t_s,count\n0,0\n5,0\n", "1: no machine ever joins; there is nothing to simulate"),
        ("spot", "t_s,count\nnan,1\n", "2:1: t_s: is 'nan'; it must be a number from 0 to 100000000"),
        ("spot", "t_s,count\n-1,1\n", "2:1: t_s: is '-1'; it must be a number from 0 to 100000000"),
        ("spot", "t_s,count\n0,1,2\n", "2: has 3 cells; the head has 2 columns; the row must have as many"),
        ("spot", "t_s,event,node\n0,ad,a\n", "2:3: event: is 'ad'; it must be one of add, remove"),
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
        ("grants", "t_s,share\n60,1\n90,0\n", "2:1: t_s: must be 0 in the first row"),
        ("grants", "t_s,share\n0,1\n", "1: has one row; the last one only ends the tape"),
        ("grants", "t_s,share\n0,1.5\n1,0\n", "2:3: share: is '1.5'; it must be a number from 0 to 1"),
        ("grants", "t_s,share\n0,0.001\n1,0\n", "2:3: share: is 0.001; it must be 0, or from 0.01 to 1"),
        ("grants", "t_s,share\n0,0\n1,1\n", "1: no share is above 0; leave out machines that are never lent"),
        ("grants", '"t_s,share\n', "1: unexpected end of data; it must be a table"),
        ("grants", 't_s,share\n0,"1\n', "2: unexpected end of data; it must be a table"),
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


def test_a_tape_of_grants_begins_again_and_tells_what_is_usual(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("t_s,share\n0,0.5\n10,1\n30,0\n40,0.2\n50,0\n")
    tape = read_grants(tmp_path / "t.csv", "t.csv")
    assert list(islice(tape.spells(12.0), 6)) == [(18, 1), (10, 0), (10, 0.2), (10, 0.5), (20, 1), (10, 0)]
    assert tape.granted_share == pytest.approx(0.8)
    assert (tape.usual_s(granted=True), tape.usual_s(granted=False)) == (20.0, 10.0)


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

    def test_grants(self) -> None:
        tape = read_grants(EXAMPLES / "grants.csv", "")
        assert tape.end_s == pytest.approx(552.98 / 1.5 + 1.0, abs=0.01)
        assert 0.1 < tape.granted_share < 0.9
