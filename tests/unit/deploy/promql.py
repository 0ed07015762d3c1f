"""What a PromQL expression names: metrics, and the labels asked of them. Not whether it means anything."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_TOKEN: Final = re.compile(
    r"""\s+ | \#[^\n]*
    | (?P<string> "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | `[^`]*`)
    | (?P<range> \[ [^\]]* \] )
    | (?P<number> \d[\w.]* (?: e[+-]?\d+ )? )
    | (?P<word> [A-Za-z_][\w:]* | \$[A-Za-z_]\w* )
    | (?P<sign> =~ | != | !~ | == | >= | <= | [-+*/%^<>=(){},@] )""",
    re.VERBOSE,
)
_OPERATORS: Final = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})
#: Words with a list of labels behind them.
_LISTS: Final = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
FUNCTIONS: Final = frozenset({
    "abs", "absent", "absent_over_time", "avg", "avg_over_time", "ceil", "changes", "clamp", "clamp_max",
    "clamp_min", "count", "count_over_time", "delta", "deriv", "floor", "histogram_quantile", "increase",
    "irate", "label_replace", "last_over_time", "max", "max_over_time", "min", "min_over_time", "quantile",
    "rate", "resets", "round", "scalar", "sort", "sort_desc", "stddev", "sum", "sum_over_time", "time", "topk",
    "bottomk", "vector",
})  # fmt: skip


class Named(NamedTuple):
    """`metrics`: each with its selector, label -> text; `labels`: those of `by (...)` and the like."""

    metrics: list[tuple[str, dict[str, str]]]
    labels: frozenset[str]


def parse(expression: str) -> Named:
    """Raises `ValueError` for what is no expression, or uses a function that is not known."""
    words = list(_words(expression))
    metrics: list[tuple[str, dict[str, str]]] = []
    labels: set[str] = set()
    at, depth = 0, 0
    while at < len(words):
        kind, text = words[at]
        follows = words[at + 1][1] if at + 1 < len(words) else ""
        depth += (text == "(") - (text == ")")
        if depth < 0 or text in {"{", "}"}:
            raise ValueError(f"{text!r} out of place in {expression!r}")
        if kind == "word" and text in _LISTS and follows == "(":
            end = _closing(words, at + 1, ")", expression)
            labels |= {word for what, word in words[at + 2 : end] if what == "word"}
            at = end
        elif kind == "word" and follows in {"(", "by", "without"} and text not in _OPERATORS:
            if text not in FUNCTIONS:
                raise ValueError(f"{text} is no function that is known, in {expression!r}")
        elif kind == "word" and text not in _OPERATORS | _LISTS and not text.startswith("$"):
            asked: dict[str, str] = {}
            if follows == "{":
                end = _closing(words, at + 1, "}", expression)
                names = [word for what, word in words[at + 2 : end] if what == "word"]
                values = [word[1:-1] for what, word in words[at + 2 : end] if what == "string"]
                asked = dict(zip(names, values, strict=True))
                at = end
            metrics.append((text, asked))
        at += 1
    if depth:
        raise ValueError(f"a bracket is open in {expression!r}")
    return Named(metrics, frozenset(labels))


def _words(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None:
            raise ValueError(f"{expression[at:]!r} is no PromQL")
        at = found.end()
        if found.lastgroup:
            yield found.lastgroup, found.group()


def _closing(words: list[tuple[str, str]], start: int, sign: str, expression: str) -> int:
    for at in range(start, len(words)):
        if words[at][1] == sign:
            return at
    raise ValueError(f"no {sign!r} in {expression!r}")
