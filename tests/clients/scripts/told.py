"""What all scripts share: where the gateway is, what they ask, the tool, and how they tell what they were answered.

A scenario has a session of its own, in the base URL: clients need not know of it.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path

URL, KEY, RUN = (os.environ[f"EBBTIDE_{name}"] for name in ("URL", "KEY", "RUN"))
MODEL = Path(os.environ["EBBTIDE_MODEL"])
_TOLD = Path(os.environ["EBBTIDE_TOLD"])

ASKED = "Where is the dog?"
DESCRIPTION = "Tells what is known of a name."
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}


def look(at: str) -> str:
    """Tells what is known of a name."""
    return f"{at} sleeps on"


def base(what: str, behind: str = "/v1") -> str:
    """The base URL of a scenario."""
    return f"{URL}/sessions/{session(what)}{behind}"


def session(what: str) -> str:
    return f"{os.environ['EBBTIDE_CLIENT']}-{what}".replace(" ", "-").replace("/", "-")


def answer(text: str | None, calls=(), tokens_in: int | None = None, tokens_out: int | None = None) -> dict:
    """One answer as its client shows it. `calls`: pairs of name and arguments, as an object or as JSON."""
    made = [[name, json.loads(given) if isinstance(given, str) else dict(given)] for name, given in calls]
    return {"text": text or "", "calls": made, "in": tokens_in, "out": tokens_out}


def tell(what: str, answers: list, *, asked=(ASKED,), own: int = 0) -> None:
    """These were all answers of the scenario, but for `own` that the client asked for by itself, and shows nobody.

    `asked`: each prompt has one of these texts, and each of them is in a prompt. Without texts, no prompt is compared.
    """
    _write({"what": what, "session": session(what), "asked": list(asked), "answers": answers, "own": own})


def tell_checked(what: str, answers: int) -> None:
    """The script compared these answers with the truth itself: there is no session."""
    _write({"what": what, "checked": answers})


def tell_version(*packages: str) -> None:
    _write({"versions": {name: version(name) for name in packages}})


def _write(line: dict) -> None:
    with _TOLD.open("a") as file:
        file.write(json.dumps(line) + "\n")
