"""Records what a client sends: an HTTP server between it and the gateway that keeps each body as it came."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from tests.clients.stand import Stand

#: Headers that the client's library sets for the connection.
_HOP: Final = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")
#: Headers that are passed on, and not kept.
_KEYS: Final = ("authorization", "x-api-key")


@contextmanager
def recording(stand: Stand, into: Path) -> Iterator[Stand]:
    """The same gateway behind another address. Path, named headers and body of each request are written at the end."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept = {name: value for name, value in self.headers.items() if name.lower() not in _HOP + _KEYS}
            seen.append({"path": self.path, "headers": kept, "body": json.loads(body)})
            headers = kept | {name: self.headers[name] for name in _KEYS if name in self.headers}
            answer = httpx.post(f"{stand.url}{self.path}", content=body, headers=headers, timeout=120)
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield msgspec.structs.replace(stand, url=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        into.parent.mkdir(parents=True, exist_ok=True)
        into.write_text(json.dumps(seen, indent=2) + "\n")
