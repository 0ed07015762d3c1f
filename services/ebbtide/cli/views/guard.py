"""Shows what a serving-guard sees and grants, to people and as JSON."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ebbtide.cli.views.tables import amount, cell, clock, data_table, fact_table, plain, watch
from ebbtide.errors import Unavailable
from ebbtide.rpc.backoff import retrying
from ebbtide.rpc.channel import Channel, open_socket
from ebbtide.rpc.status_table import translated
from ebbtide.types.grants import UNKNOWN, Borrower, GuardStatus, Latency
from ebbtide.v1.grants_pb2 import WatchGuardRequest
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from ebbtide.wire import from_proto

_LATENCIES: Final = ("", "p50", "p95", "p99", "target", "attained", "unloaded")
_BORROWERS: Final = (
    "borrower", "state", "rollouts", "tokens/s", "harvested", "GPU time", "KV", "of", "memory", "weights",
    "reclaims", "p50", "p99", "stops", "re-prefilled",
)  # fmt: skip
_LEFT: Final = ("", "borrower", "state", "memory", "weights")
_STYLES: Final = {"stopped": "red", "standing": "yellow", "away": "dim"}
_WORDS: Final = {
    "idle": "no request is in flight: rollouts may run",
    "shared": "rollouts run in the slack of the requests in flight",
    "reclaimed": "the engine is its users' alone",
    "quiet": "waits until no traffic comes",
    "blind": "nothing is known of the traffic",
    "closed": "the guard lends no more: it ends, or its log says why",
    "held": "the device is with a trainer",
    "lent": "rollouts may run until the trainer takes its device back",
    "abandoned": "rollouts may run: the trainer is gone",
    "free": "no trainer wants its turn",
    "settling": "a new guard waits for the device's owner before it lends",
}
#: `slack_s` while no request is in flight.
_NO_SLACK: Final = -1.0


def picture(status: GuardStatus) -> Group:
    """Draws a summary line, what the guard grants and why, and tables of latencies and of borrowers."""
    tables = [fact_table(_facts(status))]
    tables += [] if _of_trainer(status) else [_latencies(status)]
    borrowers = _trainers if _in_turns(status) else _borrowers
    tables += [borrowers(status.borrowers)] if status.borrowers else []
    spaced = [part for table in tables for part in (Text(), table)]
    return Group(Text(plain(head(status)), style="bold"), *spaced)


def small_picture(status: GuardStatus) -> Group:
    """Draws what fits below another screen: latencies, and what is granted now."""
    now = f"slack: {_slack(status)} · next step: {_budget(status)} · harvested: {_harvested(status)}"
    return Group(Text(plain(head(status))), _latencies(status), Text(plain(now), style="dim"))


def head(status: GuardStatus) -> str:
    """Sums up the guard's state in a line."""
    speed = sum(one.tokens_per_s for one in status.borrowers)
    count = len(status.borrowers)
    lent = f"{count} borrower{'s' * (count > 1)} at {speed:,.0f} tokens/s" if count else "no borrower"
    if _in_turns(status):
        turn = next((one.worker_id for one in status.borrowers if one.state == "its turn"), "")
        whose = f"the turn of run {turn}" if turn else status.state or "starting"
        return f"shared device: {whose}, {status.waiting} waiting"
    if _of_trainer(status):
        return f"trainer's device: {status.state or 'starting'}, {lent}"
    return (
        f"{status.model or 'served model'}: {status.state or 'starting'}, {status.inside} in flight "
        f"({status.waiting} wait), load {status.load:.0%}, {lent}"
    )


def lines(status: GuardStatus) -> Iterator[str]:
    """A line that sums up the state, and one for each borrower: for output that is no terminal."""
    parts = [head(status)]
    if not _of_trainer(status):
        parts += [f"budget {_budget(status)}", f"slack {_slack(status)}"]
        parts += [
            f"{name} p99 {_ms(one.p99)} of {_ms(one.target)}, {_attained(one)} attained" for name, one in _named(status)
        ]
    yield plain(" · ".join(parts))
    for one in status.borrowers:
        if _in_turns(status):
            yield plain(f"{one.worker_id} {one.state}")
            continue
        named = zip(_BORROWERS[2:], _borrower_row(one)[2:], strict=True)
        yield plain("; ".join((f"{one.worker_id} {one.state}", *(f"{name} {value}" for name, value in named))))


async def watch_guard(guard: "GuardClient", every_s: float, console: Console | None = None) -> None:
    """Shows the guard's state until cancelled. Raises `Unavailable` if the guard stays unreachable."""
    await watch("the serving-guard", guard.status, picture, lines, every_s, console)


def _facts(status: GuardStatus) -> Iterator[tuple[str, str]]:
    served, forecast = not _of_trainer(status), status.forecast
    yield "mode", status.mode or "-"
    if served:
        yield "requests", f"{status.requests:,} in {clock(status.uptime_s)}, {status.failed:,} failed"
    yield "state", (status.state or "-") + (f": {_WORDS[status.state]}" if status.state in _WORDS else "")
    if served:
        yield "slack", _slack(status)
        yield "next step", _budget(status)
    if _in_turns(status):
        return
    yield "harvested", _harvested(status)
    yield "forecast", f"{forecast.share:.0%} of the next minute; this lasts {_seconds(forecast.spell_s)}"
    if served:
        yield "disturbance", f"{forecast.disturbance:.0%} of the SLO's error budget, used lately while rollouts ran"
    if status.memory_limit:
        serving, limit = amount(status.serving_kv_bytes), amount(status.memory_limit)
        yield "memory", f"serving has {serving} of the pair's {limit} for the KV cache"


def _of_trainer(status: GuardStatus) -> bool:
    """Whether the device is a trainer's, or several trainers', and serves nobody: there are no requests, and no budget
    that follows from them."""
    return status.mode in {"trainer", "turns"}


def _in_turns(status: GuardStatus) -> bool:
    """Whether trainers of several runs take turns on the device: they stand in the place of borrowers."""
    return status.mode == "turns"


def _trainers(trainers: Sequence[Borrower]) -> Table:
    table = data_table(("run", "trainer"), left=("run", "trainer"))
    for one in trainers:
        table.add_row(cell(one.worker_id), cell(one.state))
    return table


def _latencies(status: GuardStatus) -> Table:
    table = data_table(_LATENCIES, left=_LEFT)
    for name, one in _named(status):
        missed = one.target and one.p99 > one.target
        table.add_row(*map(cell, (name, *_latency_row(one))), style="red" if missed else "")
    return table


def _named(status: GuardStatus) -> Iterator[tuple[str, Latency]]:
    """Latencies of the configured model (or of all), then of each model with an SLO of its own."""
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
    table = data_table(_BORROWERS, left=_LEFT)
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
    return "no request is in flight" if status.slack_s == _NO_SLACK else _ms(status.slack_s)


def _ms(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{1e3 * seconds:,.1f} ms" if abs(seconds) < 0.1 else f"{1e3 * seconds:,.0f} ms"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value < 60 else clock(value)


#: A guard answers at once unless it is frozen.
_ANSWER_S: Final = 3.0


class GuardClient:
    """Made by `guard_client`."""

    def __init__(self, channel: Channel, socket: Path, patience_s: float) -> None:
        self._stub, self._socket, self._patience_s = GrantsStub(channel), socket, patience_s

    async def status(self) -> GuardStatus:
        """The guard's present state. Raises `Unavailable` if it stays unreachable for longer than the patience."""
        return await retrying(self._ask, patience_s=self._patience_s)

    async def _ask(self) -> GuardStatus:
        try:
            with translated("serving-guard"):
                async for message in self._stub.WatchGuard(WatchGuardRequest(), timeout=_ANSWER_S):
                    return from_proto(message, GuardStatus)
        except Unavailable:
            pass
        raise Unavailable(
            f"no guard answers at {self._socket}; start one (`ebbtide serve serving-guard --grant-dir "
            f"{self._socket.parent}`), or name the folder of a running guard"
        )


@asynccontextmanager
async def guard_client(socket: Path, patience_s: float = 0.0) -> AsyncIterator[GuardClient]:
    async with open_socket(socket) as channel:
        yield GuardClient(channel, socket, patience_s)
