"""Decides whether client, proxy and engine agreed about every message of a case."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from tests.http_fuzz.h11_engine import Served
from tests.http_fuzz.http_reader import AnswerReader, Headers, HttpMessage, RequestReader, read_answer
from tests.http_fuzz.request_streams import RequestStream

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
#: Requests that a proxy may send again (RFC 9110, 9.2.2).
_REPEATABLE: Final = frozenset({b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS"})


class Evidence(Struct):
    """What was seen of one case. `left`: the client closed its connection before the end."""

    stream: RequestStream
    sent: RequestReader  # the client's stream, read without a proxy
    served: Sequence[Served]
    engine_errors: Sequence[str]
    answers: AnswerReader
    left: bool


def disagreement(seen: Evidence) -> str:
    """In what they disagree; empty: in nothing."""
    if seen.engine_errors:
        return f"the engine cannot read a request: {seen.engine_errors[0]}"
    if seen.answers.error:
        return f"the client cannot read an answer: {seen.answers.error}"
    served = _with_lost(seen, _without_repeats(seen.served))
    return _requests(seen, served) or _answers(seen, served) or _numbers(seen, served)


def _without_repeats(served: Sequence[Served]) -> list[Served]:
    """The requests without first attempts that got no answer, where the request may be repeated."""
    kept: list[Served] = []
    for one in served:
        if kept and _repeats(kept[-1], one):
            kept.pop()
        kept.append(one)
    return kept


def _repeats(former: Served, one: Served) -> bool:
    """A proxy repeats what it sent on a kept connection, once and on a new one."""
    unanswered = not former.plan.whole and not former.fresh and one.fresh
    return unanswered and one.message == former.message and _repeatable(one.message)


def _repeatable(message: HttpMessage) -> bool:
    return message.start[0] in _REPEATABLE


def _with_lost(seen: Evidence, served: Sequence[Served]) -> list[Served | None]:
    """None stands for a request that may not be repeated, written while the engine closed a connection unannounced."""
    found: list[Served | None] = []
    for one in served:
        place = len(found)
        if found and found[-1] is not None and found[-1].plan.kind == "broken answer":
            wanted = [message.passed_on() for message in seen.sent.messages[place : place + 2]]
            if len(wanted) == 2 and not _repeatable(wanted[0]) and not _same(one.message, wanted[0]):
                found.append(None)
        found.append(one)
    return found


def _same(got: HttpMessage, wanted: HttpMessage) -> bool:
    return got.start == wanted.start and _headers(got) == wanted.headers


def _headers(got: HttpMessage) -> Headers:
    return sorted([line for line in got.headers if line[0] not in _FRAMING], key=lambda line: line[0])


def _requests(seen: Evidence, served: Sequence[Served | None]) -> str:
    for number, one in enumerate(served):
        if one is None:
            continue
        if number >= len(seen.sent.messages):
            return f"the engine got {_told(one.message)}, which the client did not send"
        wanted, got = seen.sent.messages[number].passed_on(), one.message
        if not _same(got, wanted):
            return f"request {number}: the engine got {got.start} {_headers(got)}, not {wanted.start} {wanted.headers}"
        if got.complete and not (wanted.complete and wanted.body == got.body):
            return f"request {number}: the engine got {len(got.body)} bytes as its whole body, not {len(wanted.body)}"
        if not wanted.body.startswith(got.body):
            return f"request {number}: its body was changed"
        if not (got.complete or one.plan.early) and one is not served[-1]:
            return f"request {number} is not complete, and another one follows"
    return ""


def _answers(seen: Evidence, served: Sequence[Served | None]) -> str:
    left = list(seen.answers.messages)
    for number, one in enumerate(served):
        got = left.pop(0) if left else None
        if seen.left and (got is None or not got.complete):
            return ""
        if one is None:
            if got is None or not _is_own(got):
                return f"answer {number}: a request was lost, and the client got {_told(got)}"
        elif _excused(seen, number, one, got):
            continue
        elif wrong := _answer(one, got):
            return f"answer {number}: {wrong}"
    if len(left) > 1 or any(not _is_own(answer) for answer in left):
        return f"the client got {_told(left[-1])}, which the engine did not send"
    return ""


def _excused(seen: Evidence, number: int, one: Served, got: HttpMessage | None) -> bool:
    """Whether an answer need not be complete, or its end be seen, because the connection ends behind it."""
    if not seen.sent.ended or number < len(seen.sent.messages) - 1:
        return False
    if got is None or not got.complete:  # what a mutated stream has behind a connection's last request may reset it
        return seen.stream.passed is None
    wanted = read_answer(one.plan.whole, one.message.start[0], ended=one.plan.closes)
    cut = wanted is not None and not wanted.complete and wanted.body == got.body
    return cut and seen.sent.messages[number].old  # in HTTP/1.0 such an answer ends like any other


def _answer(one: Served, got: HttpMessage | None) -> str:
    wanted = read_answer(one.plan.whole, one.message.start[0], ended=one.plan.closes)
    if got is None or not got.complete:
        excused = wanted is None or not wanted.complete or not one.message.complete or one.plan.kind == "broken answer"
        return "" if excused else f"the client got no complete answer, but {_told(got)}"
    if _is_own(got):
        excused = one.plan.kind == "broken answer" or not one.message.complete
        return "" if excused else f"the engine's answer was refused: {bytes(got.body)!r}"
    if wanted is None or not wanted.complete:
        return f"the client got {_told(got)} as complete, which the engine did not complete"
    wanted, got = wanted.passed_on(), got.passed_on()
    return "" if wanted == got else f"the client got {_told(got)}, not {_told(wanted)}"


def _numbers(seen: Evidence, served: Sequence[Served | None]) -> str:
    """Whether each request passed, or was refused, of streams where that is known."""
    plain = [one for one in served if one is not None and one.plan.kind == "answer"]
    if seen.left or seen.stream.passed is None or len(plain) < len(served):
        return ""
    passed = sum(one.message.complete for one in plain)
    own = [bytes(answer.body) for answer in seen.answers.messages if _is_own(answer)]
    if passed != seen.stream.passed:
        return f"{passed} requests passed, not {seen.stream.passed}; refused: {own}"
    if bool(own) != seen.stream.refused:
        return f"refused: {own}"
    return ""


def _is_own(answer: HttpMessage) -> bool:
    """Whether the proxy itself made the answer."""
    failed, marked = answer.start[0] >= b"400", answer.header(b"x-engine")
    return failed and not marked and (not answer.body or answer.body.startswith(b'{"error":{"message":"'))


def _told(message: HttpMessage | None) -> str:
    if message is None:
        return "nothing"
    end = "" if message.complete else ", incomplete"
    return f"{message.start} {message.headers} with {bytes(message.body[:80])!r} ({len(message.body)} bytes{end})"
