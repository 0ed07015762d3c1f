"""Gives rewards to responses: ready functions by name, and functions of users as `package.module:function`.

A reward function is called as `function(response, answer, row, **reward_params)`. It returns a number, or a mapping
with `reward` and further numbers to log. What it raises, and what is no finite number, fails its own episode.
"""

import importlib
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from ebbtide.environments import parse_params
from ebbtide.environments.program_tests import ProgramLimits, passed_share
from ebbtide.errors import InvalidRequest

#: Response, answer, row -> reward.
RewardFunction = Callable[[str, Any, Mapping[str, Any]], Any]

_REWARD_FIELD: Final = "environment.params.reward"
#: A number with or without thousands separators. Exponents and fractions are for `math_verify`. Separators are looked
#: for once in a row of digits and commas: a response of nothing else would take a time that grows with its square.
_NUMBER: Final = re.compile(r"[-+]?(?:(?<![\d,])\d{1,3}(?:,\d{3})++(?![\d,])|\d+)(?:\.\d+)?|[-+]?\.\d+")
_MOST_DIGITS: Final = 100
_FENCED: Final = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Exact(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """1 if the response is the answer, or one of a list of answers, but for white space around it."""

    ignore_case: bool = False

    def __call__(self, response: str, answer: Any, row: Mapping[str, Any]) -> float:  # noqa: ARG002 - of the interface
        return float(any(self._plain(response) == self._plain(str(one)) for one in _answers(answer)))

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


class Number(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """1 if the last number of the response is the last number of the answer, as of GSM8K's `... #### 72`."""

    tolerance: Annotated[float, Meta(ge=0, le=1)] = 0.0  # relative to the answer

    def __call__(self, response: str, answer: Any, row: Mapping[str, Any]) -> float:  # noqa: ARG002 - of the interface
        wanted, given = last_number(str(answer)), last_number(response)
        if wanted is None:
            raise ValueError("the answer holds no number; take another reward, or another answer column")
        if given is None:
            return 0.0
        return float(abs(given - wanted) <= Decimal(str(self.tolerance)) * abs(wanted))


class MathVerify(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """1 if `math-verify` finds the last expression of the response equal to the answer, also fractions and LaTeX."""

    timeout_s: Annotated[int, Meta(ge=1, le=60)] = 5  # of each of parsing and comparing

    def __call__(self, response: str, answer: Any, row: Mapping[str, Any]) -> float:  # noqa: ARG002 - of the interface
        from math_verify import parse, verify

        text = str(answer).rpartition("####")[2].strip()
        marked = text if "$" in text or "\\boxed" in text else f"${text}$"  # LaTeX is found between marks alone
        gold = parse(marked, parsing_timeout=self.timeout_s)
        if not gold:
            raise ValueError("math-verify finds no expression in the answer; take another reward, or answer column")
        given = parse(response, parsing_timeout=self.timeout_s)
        return float(verify(gold, given, timeout_seconds=self.timeout_s))


class Pattern(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """1 if the last match of a regular expression (its first group, if it has one) is the answer; for rows without an
    answer, if there is a match."""

    pattern: Annotated[str, Meta(min_length=1, max_length=1000)]
    ignore_case: bool = False

    def __call__(self, response: str, answer: Any, row: Mapping[str, Any]) -> float:
        found = list(re.finditer(self.pattern, response, re.DOTALL | (re.IGNORECASE if self.ignore_case else 0)))
        if answer is None or not found:
            return float(bool(found))
        text = found[-1].group(1 if found[-1].re.groups else 0) or ""
        return Exact(ignore_case=self.ignore_case)(text, answer, row)


class Code(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """1 if the response's last Python block, or all of it without one, passes the tests that the answer holds.

    Tests are lines of Python such as asserts (a text, or a list of texts), or pairs of standard input and output (a
    list of `{"input", "output"}`, or `{"inputs": [...], "outputs": [...]}`).
    """

    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0  # of the program and all tests
    memory_mib: Annotated[int, Meta(ge=64, le=1 << 16)] = 1024
    partial_credit: bool = False  # reward the share of tests that passed

    def __call__(self, response: str, answer: Any, row: Mapping[str, Any]) -> float:  # noqa: ARG002 - of the interface
        blocks = _FENCED.findall(response)
        limits = ProgramLimits(seconds=self.timeout_s, memory_bytes=self.memory_mib << 20)
        share = passed_share(blocks[-1] if blocks else response, answer, limits)
        return share if self.partial_credit else float(share == 1.0)


#: Ready functions: name -> their parameters.
READY: Final[dict[str, type[Struct]]] = {
    "exact": Exact,
    "number": Number,
    "math_verify": MathVerify,
    "regex": Pattern,
    "code": Code,
}


def load_reward(name: str, params: Mapping[str, Any]) -> RewardFunction:
    """Loads a ready function, or imports a user's. Check the name before. Raises `InvalidRequest` naming the field."""
    if kind := READY.get(name):
        if kind is MathVerify:
            _check_math_verify()
        made: Any = parse_params(kind, params, within="environment.params.reward_params")
        if isinstance(made, Pattern):
            _check_pattern(made.pattern)
        return made  # type: ignore[no-any-return]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(READY)
        raise InvalidRequest(f"unknown reward {name!r}; use {known}, or package.module:function", field=_REWARD_FIELD)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"cannot import {name!r} ({error}); install the package where the episode driver runs", field=_REWARD_FIELD
        ) from error
    if not callable(function):
        raise InvalidRequest(f"{name!r} is no function", field=_REWARD_FIELD)
    return partial(function, **params) if params else function


def checked_reward(value: Any) -> tuple[float, dict[str, float]]:
    """Returns a reward and the numbers to log. Raises `TypeError` or `ValueError` for anything else."""
    if isinstance(value, Mapping):
        numbers = {str(name): _finite(number) for name, number in value.items()}
        if "reward" not in numbers:
            raise ValueError(f"the reward function gave {sorted(numbers)}, and no reward")
        return numbers.pop("reward"), numbers
    return _finite(value), {}


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without thousands separators; None without one."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found and len(found[-1]) <= _MOST_DIGITS else None


def _finite(value: Any) -> float:
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"the reward function gave a {type(value).__name__}, which is no number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward function gave {number}, which is no finite number")
    return number


def _answers(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def _check_math_verify() -> None:
    try:
        import math_verify  # noqa: F401 - whether it is there
    except ImportError:
        raise InvalidRequest(
            "'math_verify' needs the package math-verify: pip install 'ebbtide[math]' where the driver runs and where "
            "you submit",
            field=_REWARD_FIELD,
        ) from None


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidRequest(
            f"is no regular expression ({error})", field="environment.params.reward_params.pattern"
        ) from None
