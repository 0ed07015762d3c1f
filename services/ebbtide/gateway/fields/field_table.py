"""Checks the fields of a request's body against its route's table.

A field that is not in the table is refused by name. Nothing that changes what is generated is ignored.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from ebbtide.errors import InvalidRequest

#: As `neutral`: every value is accepted, because none changes what is generated.
ANY: Final = "any value"


class FieldRule(Struct, frozen=True, kw_only=True):
    """What a route does with one field. A null always counts as a field that is left out."""

    support: Literal["supported", "neutral", "refused"]
    neutral: tuple[Any, ...] | str = ()  # the values accepted without effect, or `ANY`
    note: str = ""  # what the field means here, or why it is refused; for people


class RouteFields(Struct, frozen=True, kw_only=True):
    """The table of one route, or of one object inside its body."""

    route: str
    rules: dict[str, FieldRule]

    def checked(self, body: Mapping[str, Any], *, inside: str = "") -> dict[str, Any]:
        """The supported fields of `body` that are not null. Raises `InvalidRequest` naming the first other field.

        `inside`: the field of the body that the object stands in.
        """
        kept = {}
        for name, value in body.items():
            rule = self.rules.get(name)
            if rule is None:
                raise self._unknown(name, inside)
            if value is None:
                continue
            if rule.support == "supported":
                kept[name] = value
            elif not _is_neutral(value, rule):
                raise InvalidRequest(_refusal(rule), field=_joined(inside, name))
        return kept

    def _unknown(self, name: str, inside: str) -> InvalidRequest:
        close = difflib.get_close_matches(name[:100], self.rules, n=1)
        hint = f"did you mean {close[0]}?" if close else "leave it out"
        return InvalidRequest(f"unknown field of {self.route}; {hint}", field=_joined(inside, name[:100]))


def supported(note: str = "") -> FieldRule:
    return FieldRule(support="supported", note=note)


def neutral(*values: Any, why: str) -> FieldRule:
    """A field of which only `values`, which change nothing, are accepted."""
    return FieldRule(support="neutral", neutral=values, note=why)


def ignored(note: str) -> FieldRule:
    """A field that changes nothing of what is generated, whatever its value."""
    return FieldRule(support="neutral", neutral=ANY, note=note)


def refused(why: str) -> FieldRule:
    return FieldRule(support="refused", note=why)


def _is_neutral(value: Any, rule: FieldRule) -> bool:
    if rule.neutral == ANY:
        return True
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in rule.neutral)


def _refusal(rule: FieldRule) -> str:
    accepted = " or ".join(repr(value) for value in rule.neutral)
    remedy = f"only {accepted} is accepted" if accepted else "leave it out"
    return f"not supported: {rule.note}; {remedy}"


def _joined(inside: str, name: str) -> str:
    return f"{inside}.{name}" if inside else name
