"""Asks Google Cloud about preemptible and spot machines: `instance/preempted` turns TRUE 30 s before the end.

The server answers when the value changes; the question's ETag names the value seen last.
"""

from collections.abc import Sequence
from typing import Final

from ebbtide.errors import Unavailable
from ebbtide.rollout_worker.notices.metadata import MetadataServer, Notice

_HEADERS: Final = {"Metadata-Flavor": "Google"}
_PATH: Final = "/computeMetadata/v1/instance/preempted"
#: The server answers after this time even without a change; the probe waits a little longer.
_HANG_S: Final = 60
_NOTICE_S: Final = 30.0


class PreemptionProbe:
    #: For servers that answer at once. A change meanwhile is answered at once.
    pause_s = 1.0

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._etag = ""

    async def ask(self) -> Sequence[Notice]:
        known, self._etag = self._etag, ""  # the plain question comes first after a failure
        wait = f"?wait_for_change=true&timeout_sec={_HANG_S}&last_etag={known}" if known else ""
        answer = await self._server.ask("GET", _PATH + wait, _HEADERS, timeout_s=_HANG_S + 10.0 if known else 0.0)
        value = answer.expect(200).body.strip().upper()
        if value not in {b"TRUE", b"FALSE"}:
            raise Unavailable("the metadata server's answer is neither TRUE nor FALSE")
        etag = answer.headers.get("ETag", "")
        self._etag = etag if etag.isalnum() else ""
        return [Notice(answer.seconds_until(None, standard_s=_NOTICE_S), "gcp: preempted")] if value == b"TRUE" else []
