"""Shows a conversation on a terminal, or answers what comes through a pipe.

Control characters in answers are replaced, because a policy may write any text.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from rich.console import Console
from rich.text import Text

from ebbtide.cli.chat.chat_history import AnswerPart, ChatHistory
from ebbtide.errors import EbbtideError

_PROMPT: Final = "> "
_REPLACED: Final = "\N{REPLACEMENT CHARACTER}"
#: Why an answer ended, where a person may wonder.
_ENDS: Final = {"length": "cut at the most tokens", "tool_calls": "it calls a tool"}


def talk(history: ChatHistory, greeting: str) -> None:
    """Read questions until the end of input. Ctrl-C stops an answer; while a question is typed, it ends the chat."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(greeting, "dim"))
    for text in _questions():
        try:
            _show(history.ask(text), console)
        except KeyboardInterrupt:
            console.print(Text(" [stopped]", "dim"))
        except EbbtideError as error:
            console.print(Text(f"{error}", "red"))


def answer_once(history: ChatHistory, text: str) -> None:
    """Print the answer to one question, and nothing else. Raises what the gateway refuses with."""
    for part in history.ask(text):
        sys.stdout.write(plain(part.text))
        sys.stdout.flush()
    sys.stdout.write("\n")


def plain(text: str) -> str:
    """The text without characters that would steer the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else _REPLACED for one in text)


def _questions() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and its keys
    while True:
        try:
            text = input(_PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if text:
            yield text


def _show(parts: Iterator[AnswerPart], console: Console) -> None:
    last = AnswerPart()
    for part in parts:
        console.print(Text(plain(part.reasoning), "dim"), Text(plain(part.text)), sep="", end="")
        last = part
    console.print()
    if told := _told(last):
        console.print(Text(told, "dim"))


def _told(last: AnswerPart) -> str:
    """Of the end of an answer: the versions that made it."""
    versions = sorted(set(last.versions))
    parts = [f"version {' to '.join(map(str, versions))}"] if versions else []
    return ", ".join([*parts, *filter(None, [_ENDS.get(last.finish, "")])])
