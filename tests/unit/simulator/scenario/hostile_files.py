"""Makes hostile scenarios: files that people wrote wrong, and mutations of good ones by a seed."""

import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Final

from tests.unit.simulator.scenario.scenario_texts import FULL, SHORT, TABLES

#: What may stand where a value was.
VALUES: Final = (
    "nan", "-nan", "inf", "-inf", "-1", "0", "1e999", "-1e-300", "1e300", "99999999999999999999", "9" * 390,
    "0x7fffffffffffffff", "true", "[]", "[1, 2]", "[[[]]]", "{}", "{ x = 1 }", '""', '"x"', '"../../../etc/passwd"',
    '"/dev/zero"', '"/dev/stdin"', '"."', '"counts.csv"', '"nowhere.csv"', '"é\\u0000"', "'''\n'''", "1979-05-27",
    "07:32:00", "1979-05-27T07:32:00Z", "1.5", "1_0", "", "= 1", '"' + "x" * 5000 + '"', "0.0000001", "4097", "[{}]",
    "{ file = 'cdf.csv', value = 3 }", "{ low = 5, high = 1 }", "{ mean = 1e8 }", "{ sigma = 6 }",
    "{ file = 'grants.csv', alike = 1 }",
)  # fmt: skip
LINES: Final = (
    "[[fleet]]", "[[run]]", "[fleet]", "[run]", "[[fault]]", "[policy]", "[fleet.grants]", "[run.lengths]",
    "[[[fleet]]]", "[]", "[[", "= 3", "x", "hours = 1", "name = 'again'", 'extends = "scenario.toml"',
    'extends = "missing.toml"', 'extends = "../a/b.toml"', 'extends = "counts.csv"', "fleet = []", "run.name = 1",
    "a" * 3000 + " = 1", '"" = 1', '"\\u0000" = 1', "\t\t", "\x00", "\x0b", "\ufeff", 'a = """', "# \x01", "'x'",
    "workers = 1", "trace = 'events.csv'", "kind = 'borrowed'", "folder = '/'", "tables = {}", "a.b.c.d.e = 1",
)  # fmt: skip
CELLS: Final = (
    "nan", "inf", "-1", "1e999", "", "x", "0", "1.5", "99999999999", "1e8", '"', '"a,b"', "a b", "add", "remove", "é",
    "x" * 300, "\x01", "0x10", "1_0", " 5 ", "-0", "1,2", "#", "\r", "0.5",
)  # fmt: skip

HANDWRITTEN: Final = {
    "empty": "", "blank": "\n\n  \n", "comment": "# nothing", "no table": "name = 'x'", "json": '{"name": "x"}',
    "yaml": "name: x\nhours: 2\n", "csv": TABLES["counts.csv"], "deep array": "a = " + "[" * 5000,
    "deep arrays": "a = " + "[" * 3000 + "]" * 3000, "deep tables": "a = " + "{a=" * 3000 + "1" + "}" * 3000,
    "long key": ".".join("a" * 20000) + " = 1", "long quoted key": ".".join(['"a"'] * 10000) + " = 1",
    "long header": "[" + ".".join("a" * 20000) + "]", "huge integer": "hours = " + "9" * 10000,
    "huge hex": "hours = 0x" + "f" * 10000, "huge float": "hours = 1." + "9" * 10000,
    "many keys": "\n".join(f"k{i} = {i}" for i in range(4000)),
    "long keys": "\n".join("k" * 3000 + f"{i} = {i}" for i in range(50)),
    "many fleets": "[[fleet]]\nname = 'a'\n" * 2000,
    "many faults": SHORT + "[[fault]]\nkind = 'kill'\nat_s = 1\n" * 6000, "too large": "# " + "x" * 400_000,
    "open string": 'name = "x\nhours = 1\n', "open multi-line string": 'name = """x\nhours = 1\n' * 2 + '"""' * 3,
    "many quotes": '"' * 20001, "backslashes": 'a = "' + "\\" * 20001,
    "many open strings": "'''" + "\n'a\n\"b" * 3000, "twice": SHORT + "name = 'b'\n",
    "table twice": SHORT + "[policy]\n[policy]\n", "nothing ends it": SHORT.replace("hours = 2.0\n", ""),
    "too many machines": SHORT.replace("workers = 6", "workers = 20001"),
    "extends itself": 'extends = "scenario.toml"\n' + SHORT, "trailing": SHORT + "]",
    "two values": SHORT + "a = 1 b = 2",
}  # fmt: skip

Mutation = Callable[[Random, str], str]
_PAIR: Final = re.compile(r"(?<== )[^=\n{}]+?(?= *[,}\n])")
_KEY: Final = re.compile(r"^[a-z_]+(?= =)", re.MULTILINE)


def _another_value(draw: Random, text: str) -> str:
    if not (spots := list(_PAIR.finditer(text))):
        return text
    spot = draw.choice(spots)
    return text[: spot.start()] + draw.choice(VALUES) + text[spot.end() :]


def _another_key(draw: Random, text: str) -> str:
    if not (spots := list(_KEY.finditer(text))):
        return text
    spot = draw.choice(spots)
    name = list(spot.group())
    name[draw.randrange(len(name))] = draw.choice(["", "x", "-", "é", ".", name[0] * 2])
    return text[: spot.start()] + "".join(name) + text[spot.end() :]


def _line(draw: Random, text: str) -> str:
    lines = text.split("\n")
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(other, lines[at])
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines.insert(at, draw.choice(LINES))
    return "\n".join(lines)


def _character(draw: Random, text: str) -> str:
    at = draw.randrange(len(text))
    put = draw.choice(
        ['"', "'", "[", "]", "{", "}", "=", ",", "#", "\n", "\\", ".", "0", "\r", "\x7f", "\u2028", "🙂", ""]
    )
    return text[:at] + put + text[at + draw.randrange(2) :]


def _cut(draw: Random, text: str) -> str:
    return text[: draw.randrange(1, len(text))]


MUTATIONS: Final[tuple[Mutation, ...]] = (_another_value, _another_value, _another_key, _line, _line, _character, _cut)


def mutated(seed: int) -> str:
    """A good scenario with one to three mutations."""
    draw = Random(f"{seed} hostile scenario")
    text = draw.choice([SHORT, FULL, FULL, FULL])
    for _ in range(draw.randint(1, 3)):
        text = draw.choice(MUTATIONS)(draw, text)
    return text


def mutated_table(seed: int) -> tuple[str, str]:
    """The name of a table of `FULL`, and its text with a cell, a row or some characters changed."""
    draw = Random(f"{seed} hostile table")
    name = draw.choice(sorted(TABLES))
    rows = [line.split(",") for line in TABLES[name].splitlines()]
    for _ in range(draw.randint(1, 2)):
        at = draw.randrange(len(rows))
        kind = draw.randrange(5)
        if kind == 0:
            rows.insert(draw.randrange(len(rows)), rows[at])
        elif kind == 1 and len(rows) > 1:
            del rows[at]
        else:
            rows[at][draw.randrange(len(rows[at]))] = draw.choice(CELLS)
    text = "\n".join(",".join(row) for row in rows)
    return name, _character(draw, text) if draw.random() < 0.2 else text


def files() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield (name, scenario, tables) of all."""
    for name, text in HANDWRITTEN.items():
        yield name, text, TABLES
    for seed in range(400):
        yield f"scenario {seed}", mutated(seed), TABLES
    for seed in range(150):
        name, text = mutated_table(seed)
        yield f"table {seed} {name}", FULL, {**TABLES, name: text}
