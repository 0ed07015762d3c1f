"""`make test-clients`: installed clients, each in an environment of its own, ask a real gateway by their own bodies.

    python -m tests.clients [CLIENT ...] [--write] [--allow-missing] [--record CLIENT]

What a client shows of an answer is compared with its session's trace. Prints a table, and writes it into
docs/guides/clients.md with `--write`. Exit status 1: a client was answered wrongly, or not at all, or could not be
installed; with `--allow-missing` only its row tells of the last.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from tests.clients.answers import TraceReader
from tests.clients.environments import ROOT, ClientPlan, Failed, client_plans, install_log, made_environment, played
from tests.clients.page import ClientRow, table, write_table
from tests.clients.recorder import recording
from tests.clients.stand import Stand, clients_stand

_PAGE: Final = ROOT / "docs" / "guides" / "clients.md"
_RUNS: Final = ROOT / "runs" / "clients"


def row_of(plan: ClientPlan, lines: Sequence[dict[str, Any]], stand: Stand, reader: TraceReader) -> ClientRow:
    """What a script told, judged."""
    wrong, ran, answers, versions = list[str](), list[str](), 0, dict[str, str]()
    for line in lines:
        versions |= line.get("versions", {})
        if "failed" in line:
            wrong.append(line["failed"])
        elif "what" in line:
            ran.append(line["what"])
            answers += line.get("checked") or len(line["answers"])
            wrong += [f"{line['what']}: {one}" for one in _differences(line, stand, reader)]
    found = f"all {answers} answers are right" if not wrong else "; ".join(wrong)[:600]
    return ClientRow(
        client=plan.name,
        version=", ".join(versions.values() if len(versions) == 1 else (f"{k} {v}" for k, v in versions.items())),
        ran="; ".join(ran) or "nothing",
        result=found if ran or wrong else "its script told nothing",
        right=bool(ran) and not wrong,
    )


def missing_row(plan: ClientPlan, reason: str) -> ClientRow:
    """One that has no environment."""
    pins = ", ".join(plan.pins)
    return ClientRow(client=plan.name, version=pins, ran="nothing", result=reason, right=False, installed=False)


def _differences(line: dict[str, Any], stand: Stand, reader: TraceReader) -> list[str]:
    if "checked" in line:
        return []
    try:
        return list(reader.differences(line, stand.trace(line["session"])))
    except httpx.HTTPError as error:
        return [f"no trace: {error}"]


async def _rows(plans: Sequence[ClientPlan], recorded: str) -> list[ClientRow]:
    """A row for each client, in order; those that cannot be installed have the reason."""
    rows, pythons = dict[str, ClientRow](), dict[str, Path]()
    for plan in plans:
        _notify(f"{plan.name}: environment")
        try:
            pythons[plan.name] = await asyncio.to_thread(made_environment, plan)
        except Failed as error:
            rows[plan.name] = missing_row(plan, str(error))
            _notify(f"{plan.name}: {error}; {install_log(plan)} has why")
    with tempfile.TemporaryDirectory(prefix="ebb-clients-") as folder:
        async with clients_stand(Path(folder)) as stand:
            reader = TraceReader(stand.model)
            for plan in plans:
                if plan.name not in pythons:
                    continue
                into = _RUNS / plan.name
                recorder = recording(stand, into / "bodies.json")
                with recorder if plan.name == recorded else contextlib.nullcontext(stand) as seen:
                    lines = await asyncio.to_thread(played, plan, pythons[plan.name], seen, into)
                rows[plan.name] = await asyncio.to_thread(row_of, plan, lines, stand, reader)
                _notify(f"{plan.name}: {rows[plan.name].result}")
    return [rows[plan.name] for plan in plans]


def _notify(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    plans = {plan.name: plan for plan in client_plans()}
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"default: all of {', '.join(plans)}")
    parser.add_argument("--write", action="store_true", help="write the table into docs/guides/clients.md")
    parser.add_argument("--allow-missing", action="store_true", help="let clients be missing that cannot be installed")
    parser.add_argument("--record", default="", metavar="CLIENT", help="keep the bodies that it sends")
    options = parser.parse_args(argv)
    if unknown := set(options.clients) - set(plans):
        parser.error(f"{', '.join(sorted(unknown))}: no client of tests/clients/clients.toml")
    if options.write and options.clients:
        parser.error("--write: the page's table has all clients; name none")
    rows = asyncio.run(_rows([plans[name] for name in options.clients or plans], options.record))
    sys.stdout.write(f"{table(rows)}\n")
    if options.write:
        write_table(_PAGE, rows)
    return 0 if all(row.right or (options.allow_missing and not row.installed) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
