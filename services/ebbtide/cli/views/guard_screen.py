"""What a serving-guard sees and grants, for a person and for programs.

Invariant: it only reads what the guard tells, and leaves nothing behind.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ebbtide.cli.views.tables import amount, cell, clock, plain, wide_console
from ebbtide.cli.views.watch_loop import watch
from ebbtide.types.grants import UNKNOWN, Borrower, GuardStatus, Latency

if TYPE_CHECKING:
    from ebbtide.cli.views.guard_client import GuardClient

_LATENCIES: Final = ("", "p50", "p95", "p99", "target", "attained", "unloaded")
_BORROWERS: Final = (
    "borrower", "state", "rollouts", "tokens/s", "harvested", "GPU time", "KV", "of", "memory", "weights",
    "reclaims", "p50", "p99", "stops", "read again",
)  # fmt: skip
_LEFT: Final = ("", "borrower", "state", "memory", "weights")
_STYLES: Final = {"stopped": "red", "standing": "yellow", "away": "dim"}
_WORDS: Final = {
    "idle": "nothing is inside: rollouts may run",
    "shared": "rollouts run in the slack of what is inside",
    "reclaimed": "the engine is its users' alone",
    "quiet": "waits for the traffic to stay away",
    "blind": "nothing is known of the traffic",
    "closed": "the guard lends no more: it ends, or its log says why",
}
#: Nobody waits: `slack_s` then.
_NO_SLACK: Final = -1.0


def picture(status: GuardStatus) -> Group:
    """All of it: a line on the whole, what it grants and why, then tables of latencies and of borrowers."""
    parts: list[RenderableType] = [
        Text(plain(head(status)), style="bold"),
        Text(),
        _facts(status),
        Text(),
        _latencies(status),
    ]
    if status.borrowers:
        parts += [Text(), _borrowers(status.borrowers)]
    return Group(*parts)


def small_picture(status: GuardStatus) -> Group:
    """What fits below something else: latencies, and what is granted now."""
    now = f"slack: {_slack(status)} · next step: {_budget(status)} · harvested: {_harvested(status)}"
    return Group(Text(plain(head(status))), _latencies(status), Text(plain(now), style="dim"))


def head(status: GuardStatus) -> str:
    """The whole in a line."""
    speed = sum(one.tokens_per_s for one in status.borrowers)
    count = len(status.borrowers)
    lent = f"{count} borrower{'s' * (count > 1)} at {speed:,.0f} tokens/s" if count else "no borrower"
    return (
        f"{status.model or 'served model'}: {status.state or 'starting'}, {status.inside} inside "
        f"({status.waiting} wait), load {status.load:.0%}, {lent}"
    )


def lines(status: GuardStatus) -> Iterator[str]:
    """A line on the whole, one for the latencies and one for each borrower: for output that is no terminal."""
    latencies = " · ".join(
        f"{name} p99 {_ms(one.p99)} of {_ms(one.target)}, {_attained(one)} attained" for name, one in _named(status)
    )
    yield plain(f"{head(status)} · budget {_budget(status)} · slack {_slack(status)} · {latencies}")
    for one in status.borrowers:
        named = zip(_BORROWERS[2:], _borrower_row(one)[2:], strict=True)
        yield plain("; ".join((f"{one.worker_id} {one.state}", *(f"{name} {value}" for name, value in named))))


def tell(status: GuardStatus, *, as_json: bool) -> None:
    if as_json:
        print(to_json(status))  # noqa: T201 - this is a command
    else:
        wide_console().print(picture(status))


def to_json(status: GuardStatus) -> str:
    """The record as it is; the weights' places by their names."""
    tree: Any = msgspec.to_builtins(status)
    for one, borrower in zip(tree["borrowers"], status.borrowers, strict=True):
        one["residency"] = borrower.residency.name.lower()
    return json.dumps(tree, indent=2)


async def watch_guard(guard: "GuardClient", every_s: float, console: Console | None = None) -> None:
    """Show it until cancelled. Raises `Unavailable` when the guard stays away."""
    await watch(guard.status, picture, lines, every_s, console)


def _facts(status: GuardStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    requests = f"{status.requests:,} in {clock(status.uptime_s)}, {status.failed:,} failed"
    forecast = status.forecast
    rows = [
        ("mode", status.mode or "-"),
        ("requests", requests),
        ("state", f"{status.state or '-'}: {_WORDS[status.state]}" if status.state in _WORDS else status.state or "-"),
        ("slack", _slack(status)),
        ("next step", _budget(status)),
        ("harvested", _harvested(status)),
        ("forecast", f"{forecast.share:.0%} of the next minute; this lasts {_seconds(forecast.spell_s)}"),
        ("disturbance", f"{forecast.disturbance:.0%} of the SLO's error budget, used lately beside rollouts"),
    ]
    if status.memory_limit:
        serving = amount(status.serving_kv_bytes)
        rows.append(
            ("memory", f"serving has {serving} of the pair's {amount(status.memory_limit)} for keys and values")
        )
    for name, text in rows:
        table.add_row(name, cell(text))
    return table


def _latencies(status: GuardStatus) -> Table:
    named = _named(status)
    table = _table(_LATENCIES)
    for name, one in named:
        missed = one.target and one.p99 > one.target
        table.add_row(*map(cell, (name, *_latency_row(one))), style="red" if missed else "")
    return table


def _named(status: GuardStatus) -> Iterator[tuple[str, Latency]]:
    """Of the model that the guard was told of, or of all; then of those with an SLO of their own, by their names."""
    yield from (("TTFT", status.ttft), ("TPOT", status.tpot))
    for one in status.models:
        name = one.model or "others"
        yield from ((f"TTFT {name}", one.ttft), (f"TPOT {name}", one.tpot))


def _latency_row(one: Latency) -> tuple[str, ...]:
    target = _ms(one.target) if one.target else "learning"
    return (_ms(one.p50), _ms(one.p95), _ms(one.p99), target, _attained(one), _ms(one.unloaded))


def _attained(one: Latency) -> str:
    return "-" if one.attained == UNKNOWN else f"{one.attained:.2%}"


def _borrowers(borrowers: Sequence[Borrower]) -> Table:
    table = _table(_BORROWERS)
    for one in borrowers:
        table.add_row(*map(cell, _borrower_row(one)), style=_STYLES.get(one.state, ""))
    return table


def _borrower_row(one: Borrower) -> tuple[str, ...]:
    return (
        one.worker_id,
        one.state or "-",
        str(one.running),
        f"{one.tokens_per_s:,.0f}",
        f"{one.tokens_harvested:,}",
        f"{one.gpu_seconds:,.1f} s",
        amount(one.kv_bytes_used),
        amount(one.kv_bytes),
        one.memory or "-",
        one.residency.name.lower(),
        f"{one.reclaims:,}",
        _ms(one.reclaim_p50_s),
        _ms(one.reclaim_p99_s),
        str(one.stops),
        f"{one.recomputed_tokens:,}",
    )


def _budget(status: GuardStatus) -> str:
    return f"{status.tokens:,} tokens of {status.sequences:,} rollouts" if status.tokens else "none"


def _harvested(status: GuardStatus) -> str:
    tokens = sum(one.tokens_harvested for one in status.borrowers)
    return f"{tokens:,} tokens in {sum(one.gpu_seconds for one in status.borrowers):,.1f} GPU-seconds"


def _slack(status: GuardStatus) -> str:
    return "nobody is inside" if status.slack_s == _NO_SLACK else _ms(status.slack_s)


def _ms(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{1e3 * seconds:,.1f} ms" if abs(seconds) < 0.1 else f"{1e3 * seconds:,.0f} ms"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value < 60 else clock(value)


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    return table
