"""`ebbtide run chat`: what is asked of a gateway, what a person sees, and which errors name which remedy."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

from ebbtide.cli.chat import ChatHistory, ChatOptions, GatewayConnection, GatewayFiles, GatewayTarget, plain, run, talk
from ebbtide.errors import EbbtideError, InvalidRequest, NotFound, Unauthenticated, Unavailable

Reply = Callable[[BaseHTTPRequestHandler], None]


def chunk(text: str = "", *, finish: str | None = None, **further: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **further}


LAST = chunk("one", finish="stop", weight_version_start=3, weight_version_end=4)


class Script:
    """A gateway whose answers are written down. An exception among the events is raised there."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert path == "/v1/chat/completions"
        self.asked.append(body)
        for event in self.answers.pop(0):
            if isinstance(event, BaseException):
                raise event
            yield event


def chat(script: Script, **options: Any) -> ChatHistory:
    return ChatHistory(cast("GatewayConnection", script), "spell-1", ChatOptions(**options))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a person types; then the end of input."""
    lines: list[str] = []

    def read(_prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    return lines


@contextmanager
def serving(reply: Reply) -> Iterator[str]:
    """The URL of a server that answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            reply(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            reply(self)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def whole(status: int, content: Any) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return reply


def refusal(status: int, message: str) -> Reply:
    return whole(status, {"error": {"message": message, "code": status}})


def events_of(url: str) -> list[dict[str, Any]]:
    return list(GatewayConnection(url, "key").events("/v1/chat/completions", {}))


def test_each_turn_sends_all_that_was_said_and_the_options() -> None:
    script = Script([chunk("He"), chunk("llo"), LAST], [LAST])
    history = chat(script, system="Be brief.", max_tokens=5, version=3)
    said = "".join(part.text for part in history.ask("hi"))
    list(history.ask("again"))
    assert said == "Helloone"
    first, second = script.asked
    assert (first["model"], first["stream"], first["max_tokens"]) == ("spell-1", True, 5)
    assert first["weight_version"] == {"exact_version": 3}
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "hi", "Helloone", "again"]
    assert "temperature" not in first


def test_a_turn_that_fails_leaves_no_trace_and_one_that_is_stopped_what_was_shown() -> None:
    history = chat(Script([chunk("Hel"), Unavailable("away")], [chunk("Hel"), LAST]))
    with pytest.raises(Unavailable):
        list(history.ask("hi"))
    assert history.messages == []
    answer = history.ask("hi")
    next(answer)
    answer.close()  # type: ignore[attr-defined]  # a generator
    assert [message["content"] for message in history.messages] == ["hi", "Hel"]


def test_a_person_sees_the_answer_its_versions_and_goes_on_after_errors_and_ctrl_c(
    typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(
        [chunk("Hello "), LAST], [Unavailable("no worker is there")], [chunk("so"), KeyboardInterrupt()], [LAST]
    )
    typed += ["hi", "", "you?", "go on", "and?"]
    talk(chat(script), "Welcome.")
    shown = capsys.readouterr().out
    assert shown.split("\n")[:-1] == [
        "Welcome.",
        "Hello one",
        "version 3 to 4",
        "no worker is there",
        "so [stopped]",
        "one",
        "version 3 to 4",
        "",
    ]
    assert [message["content"] for message in script.asked[-1]["messages"]] == [
        "hi",
        "Hello one",
        "go on",
        "so",
        "and?",
    ]


def test_a_policy_cannot_steer_the_terminal() -> None:
    assert plain("a\x1b[2J\x07b\r\n\tc\x9b") == "a\ufffd[2J\ufffdb\ufffd\n\tc\ufffd"


def test_events_come_as_they_are_sent_until_the_last_one() -> None:
    stream = b': waiting\n\nevent: x\ndata: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
    with serving(whole(200, stream)) as url:
        assert events_of(url) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (refusal(400, "messages: too long"), InvalidRequest, "messages: too long"),
        (refusal(401, "the key is wrong"), Unauthenticated, "the key is wrong"),
        (refusal(404, "no live run"), NotFound, "no live run"),
        (refusal(503, "no version"), Unavailable, "no version"),
        (whole(404, b"<html>"), NotFound, "404 Not Found; is this a gateway's URL"),
        (whole(200, b'data: {"error": {"message": "given up", "code": 503}}\n\n'), Unavailable, "given up"),
        (whole(200, b'data: {"a": 1}\n\n'), Unavailable, "went away in the middle of an answer"),
        (lambda handler: None, Unavailable, "did not answer"),
    ],
)
def test_a_refusal_says_what_the_gateway_says_and_a_broken_answer_where_it_broke(
    reply: Reply, kind: type[EbbtideError], said: str
) -> None:
    with serving(reply) as url, pytest.raises(kind, match=said):
        events_of(url)


def test_an_answer_to_one_message_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    stream = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in (chunk("Hello "), LAST))
    with serving(whole(200, stream + b"data: [DONE]\n\n")) as url:
        run(GatewayTarget(url=url, key="key"), "spell-1", ChatOptions(), "hi")
    assert capsys.readouterr().out == "Hello one\n"


def test_a_run_that_is_not_there_is_told_before_anything_is_typed() -> None:
    with serving(refusal(404, "no live run has the id 'x'")) as url, pytest.raises(NotFound, match="no live run"):
        run(GatewayTarget(url=url, key="key"), "x", ChatOptions(), None)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gateway:7640", "--gateway: 'gateway:7640' is no URL of a gateway"),
        ("ftp://gateway", "is no URL"),
        ("http://gateway:x", "is no URL"),
        ("http://10.0.0.1:7640", "--gateway: 10.0.0.1:7640 is not loopback and TLS is off"),
    ],
)
def test_a_url_that_is_none_or_would_show_the_key_is_refused(
    url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EBBTIDE_ALLOW_INSECURE", raising=False)
    with pytest.raises(InvalidRequest, match=said.replace("(", r"\(")):
        GatewayTarget(url=url, key="key").connection()


def test_a_file_of_authorities_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequest, match="--tls-ca: 'no/file' cannot be read"):
        GatewayConnection("https://gateway", "key", GatewayFiles(authority="no/file"))


def test_nobody_listening_names_the_remedy() -> None:
    with serving(whole(200, {})) as url:
        pass
    with pytest.raises(Unavailable, match=r"no gateway answers at .* start one"):
        GatewayConnection(url, "key").get("/v1/models")
