"""Calls the routes of sessions at a gateway: what a trainer of agents needs beside the agents themselves."""

from typing import Any

import aiohttp

from ebbtide.errors import EbbtideError


class SessionApi:
    """The sessions of one run. `http` must have the gateway as its base URL, and the key among its headers."""

    def __init__(self, http: aiohttp.ClientSession, run_id: str) -> None:
        self._http, self._query = http, {"model": run_id}

    async def open(self, session_id: str, group_id: str) -> None:
        """Opens a session, which its agent then finds under `/sessions/{session_id}`. Raises `EbbtideError`."""
        await self._call("POST", "/v1/sessions", {"session_id": session_id, "group_id": group_id})

    async def trace(self, session_id: str) -> dict[str, Any]:
        """Returns all tokens of a session. Raises `EbbtideError`."""
        return await self._call("GET", f"/v1/sessions/{session_id}")

    async def reward(self, session_id: str, reward: float) -> None:
        """Ends a session as trajectories. Raises `EbbtideError`."""
        await self._call("POST", f"/v1/sessions/{session_id}/reward", {"reward": reward})

    async def drop(self, session_id: str, reason: str) -> None:
        """Ends a session that shall not be trained on. Raises `EbbtideError`."""
        await self._call("POST", f"/v1/sessions/{session_id}/end", {"drop_reason": reason})

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self._http.request(method, path, params=self._query, json=body) as answer:
                if answer.status >= 400:
                    raise EbbtideError(f"{method} {path} was answered {answer.status}: {(await answer.text())[:300]}")
                found: dict[str, Any] = await answer.json()
                return found
        except aiohttp.ClientError as error:
            raise EbbtideError(f"{method} {path} failed: {type(error).__name__}: {error}") from error
