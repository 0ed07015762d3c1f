"""Places of values that the scanner finds are those where tomllib finds the values."""

import tomllib
from collections.abc import Iterator
from random import Random
from tomllib._parser import parse_value  # type: ignore[import-not-found]
from typing import Any

import pytest

from ebbtide.checked_files import TomlPath, excess, offsets

ODD = {
    "plain": "a = 1\nb = 'x'\n",
    "no newline at the end": "a = 1",
    "blanks and comments": "  \t a  =  1  # b = 2\n\n# c = 3\n\tb = 'a # b'\n",
    "carriage returns": "a = 1\r\n[t]\r\nb = [1,\r\n 2]\r\n",
    "quoted keys": '"a b" = 1\n\'c.d\' = 2\n"" = 3\n"\\u00e9\\"=" = 4\n',
    "dotted keys": "a.b . c = 1\na.\"x.y\".'z' = 2\n[t.u]\nv.w = 3\n",
    "multi-line strings": 'a = """x = 1\n[t]\n\\"""y""""\nb = \'\'\'q\'\'p\n\'\'\'\'\nc = ""\nd = """"""\n',
    "escapes": 'a = "\\"] # x"\nb = \'\\\'\nc = "\\\\"\n',
    "arrays": 'a = [ # one\n 1, [2, 3], # two\n [], ["]"], ]\nb = []\n',
    "inline tables": "a = {b = 1, c.d = [ {e = 2}, {} ], \"f\" = '}'}\nb = {}\n",
    "arrays of tables": "[[a]]\nx = 1\n[[a.b]]\ny = 2\n[[a.b]]\ny = 3\n[a.c]\nz = 4\n[[a]]\n[[a.b]]\ny = 5\n",
    "late parents": "[a.b.c]\nx = 1\n[a]\ny = 2\n[a.b]\nz = 3\n",
    "times": "a = 1979-05-27 07:32:00 # x\nb = 1979-05-27T07:32:00Z\nc = [1979-05-27,07:32:00]\n",
    "numbers": "a = +1_000\nb = 0x0f\nc = inf\nd = -nan\ne = 1e-6\nf = [0b1,0o7]\n",
}


def leaves(tree: Any, path: TomlPath = ()) -> Iterator[tuple[TomlPath, Any]]:
    """All values of a table, and the tables and arrays that have them."""
    if path:
        yield path, tree
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield from leaves(value, (*path, key))


def check_places(text: str) -> None:
    plain = text.replace("\r\n", "\n")
    tree, found = tomllib.loads(text), offsets(plain)
    for path, value in leaves(tree):
        assert path in found or isinstance(value, dict | list), path
        at = found[path][1] if path in found else -1
        header = at >= 0 and isinstance(value, dict) and plain[at] != "{"  # of a table: it begins with its name
        if at >= 0 and not header:
            assert repr(parse_value(plain, at, float)[1]) == repr(value), path
    assert found.keys() <= dict(leaves(tree)).keys()


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_every_value_stands_where_tomllib_reads_it(text: str) -> None:
    check_places(text)


class Writer:
    """Writes random documents in random styles."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(f"{seed} toml")
        self.named = 0

    def key(self) -> str:
        self.named += 1
        return self.draw.choice([f"k{self.named}", f'"k {self.named}"', f"'k.{self.named}'", f"a{self.named} . b"])

    def blank(self) -> str:
        return self.draw.choice(["", " ", "\t ", "  "])

    def gap(self) -> str:
        return self.draw.choice(["", " ", "\n", " # [x] = {\n", "\n\n\t"])

    def value(self, depth: int = 0) -> str:
        scalars = ["1", "-2.5e3", "true", '"a\\"#]"', "'b}'", '"""c\n= [""d"""', "'''e\n''f'''", "2001-01-01 10:00:00"]
        kind = self.draw.randrange(4 if depth < 3 else 1)
        if kind == 2:
            inner = [self.gap() + self.value(depth + 1) + self.gap() for _ in range(self.draw.randrange(4))]
            return f"[{','.join(inner)}{self.gap()}]"
        if kind == 3:
            inner = [self.blank() + self.pair(depth + 1) for _ in range(self.draw.randrange(4))]
            return "{" + ",".join(inner) + self.blank() + "}"
        return self.draw.choice(scalars)

    def pair(self, depth: int = 0) -> str:
        return f"{self.key()}{self.blank()}={self.blank()}{self.value(depth)}{self.blank()}"

    def document(self) -> str:
        parts = [self.pair() for _ in range(self.draw.randrange(4))]
        for _ in range(self.draw.randrange(6)):
            parts.append(self.draw.choice(["[[t]]", "[[t]]", f"[{self.key()}]", "[[t]]\n[[t.u]]"]) + self.blank())
            parts += [self.blank() + self.pair() for _ in range(self.draw.randrange(4))]
        return "\n".join(parts) + self.draw.choice(["", "\n", " # end"])


def test_every_value_of_random_documents_stands_where_tomllib_reads_it() -> None:
    for seed in range(300):
        text = Writer(seed).document()
        try:
            check_places(text)
        except (AssertionError, LookupError) as error:
            raise AssertionError(f"seed {seed}:\n{text}") from error


@pytest.mark.parametrize(
    "text", ["a = 1", "a = [[[1]]]\n" * 50, "[[a]]\n" * 500, "x = '" + "[" * 100 + "'", "# " + "a." * 99]
)
def test_what_scenarios_may_have_is_no_excess(text: str) -> None:
    assert excess(text) is None


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a = 1\nb = " + "[" * 33, 2, "nested"),
        ("a = " + "{a = " * 40, 1, "nested"),
        ("a = 1\n\n" + "9" * 500, 3, "digits"),
        ("a = 0x" + "f" * 5000, 1, "digits"),
        ("[" + '"a".' * 20, 1, "parts"),
        ("a . " * 17 + "b = 1", 1, "parts"),
    ],
)
def test_what_would_slow_a_parser_down_is_found_before(text: str, line: int, what: str) -> None:
    found = excess(text)
    assert found is not None
    assert (found[0].line, what in found[1]) == (line, True)
