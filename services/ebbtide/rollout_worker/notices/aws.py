"""AWS spot instances: `spot/instance-action` is absent until, as a rule two minutes before the end, it is there.

IMDSv2: each question bears a token, which is asked for first and expires.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from ebbtide.rollout_worker.notices import Notice
from ebbtide.rollout_worker.notices.metadata import MetadataAnswer, MetadataServer, parse_date

_TOKEN_TTL_S: Final = 21600
_NOTICE_S: Final = 120.0


class InstanceAction(Struct, frozen=True):
    """`action`: terminate, stop or hibernate; the machine is gone after each. `time`: RFC 3339."""

    action: Annotated[str, Meta(max_length=64)]
    time: Annotated[str, Meta(max_length=64)] = ""


class SpotProbe:
    pause_s = 2.0

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._token, self._renew_at = "", 0.0

    async def ask(self) -> Sequence[Notice]:
        answer = await self._ask()
        if answer.status == 401:  # the token was forgotten: ask for another, once
            self._token = ""
            answer = await self._ask()
        if answer.expect(200, 404).status == 404:
            return []
        found = msgspec.json.decode(answer.body, type=InstanceAction)
        within_s = answer.seconds_until(parse_date(found.time), standard_s=_NOTICE_S)
        return [Notice(within_s, f"aws: {found.action} at {found.time or 'any moment'}")]

    async def _ask(self) -> MetadataAnswer:
        if not self._token or time.monotonic() > self._renew_at:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            answer = await self._server.ask("PUT", "/latest/api/token", headers)
            self._token = answer.expect(200).body.decode("ascii")
            self._renew_at = time.monotonic() + _TOKEN_TTL_S / 2
        headers = {"X-aws-ec2-metadata-token": self._token}
        return await self._server.ask("GET", "/latest/meta-data/spot/instance-action", headers)
