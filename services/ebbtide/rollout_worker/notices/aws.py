"""Asks AWS about spot instances: `spot/instance-action` appears, as a rule two minutes before the end.

By IMDSv2, each question carries a token, which the server issues and which expires.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from ebbtide.rollout_worker.notices.metadata import MetadataAnswer, MetadataServer, Notice, parse_date

_TOKEN_TTL_S: Final = 21600
_NOTICE_S: Final = 120.0


class InstanceAction(Struct, frozen=True):
    """The end of the machine."""

    action: Annotated[str, Meta(max_length=64)]  # terminate, stop or hibernate: the machine is gone after each
    time: Annotated[str, Meta(max_length=64)] = ""  # RFC 3339


class SpotProbe:
    pause_s = 2.0

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._token, self._renew_at = "", 0.0

    async def ask(self) -> Sequence[Notice]:
        answer = await self._ask()
        if answer.status == 401:  # the server forgot the token: try one other
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
