"""The parts of the Hugging Face Hub's HTTP API that `huggingface_hub` calls to fetch and to push a model."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "b" * 40


class FakeHub(ThreadingHTTPServer):
    """Serves `repositories`: name -> path -> content. A push needs `token`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.token = ""
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - of the base class
        self.server.asked.append(f"{self.command} {self.path}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        for name, files in self.server.repositories.items():
            if path in {
                f"/api/models/{name}",
                f"/api/models/{name}/revision/main",
                f"/api/models/{name}/revision/{COMMIT}",
            }:
                self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]})
                return
            if path == f"/api/models/{name}/tree/{COMMIT}":
                self._json(
                    [
                        {"type": "file", "path": one, "size": len(content), "oid": _digest(content)}
                        for one, content in files.items()
                    ]
                )
                return
            for one, content in files.items():
                if path == f"/{name}/resolve/{COMMIT}/{one}":
                    self._answer(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT})
                    return
        self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.server.token or self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer(401, b"", {})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.server.repositories.setdefault(name, {})
            self.server.private.setdefault(name, bool(asked.get("private")) or asked.get("visibility") == "private")
            self._json({"url": f"{self.server.url}/{name}", "name": name, "id": name})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            self._json(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
            )
        elif self.path.endswith("/commit/main"):
            name = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.repositories[name][line["value"]["path"]] = content
            self._json({"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True})
        else:
            self._answer(404, b"", {})

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
