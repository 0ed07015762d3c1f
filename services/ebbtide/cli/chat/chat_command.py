"""Runs `ebbtide chat`."""

import os
from urllib.parse import quote

from msgspec import Struct

from ebbtide.cli.chat.chat_history import ChatHistory, ChatOptions
from ebbtide.cli.chat.chat_screen import answer_once, talk
from ebbtide.cli.chat.gateway_connection import GatewayConnection, GatewayFiles
from ebbtide.errors import InvalidRequest


class GatewayTarget(Struct, frozen=True, kw_only=True):
    """Which gateway is asked, and with which key."""

    url: str
    key: str
    authority: str = ""  # PEM file

    def connection(self) -> GatewayConnection:
        """With the user's own certificate if there is one, for gateways that ask for it.

        Raises `InvalidRequest`, also for an address off the loopback without TLS.
        """
        from ebbtide.auth.security import refuse_clear

        certificate, key = (os.environ.get(f"EBBTIDE_TLS_{name}", "") for name in ("CERT", "KEY"))
        files = GatewayFiles(authority=self.authority, certificate=certificate, key=key)
        made = GatewayConnection(self.url, self.key, files)
        if not made.is_secure:
            allowed = os.environ.get("EBBTIDE_ALLOW_INSECURE", "").lower() in ("true", "1")
            refuse_clear(made.address, allowed=allowed, field="--gateway")
        return made


def run(target: GatewayTarget, run_id: str, options: ChatOptions, message: str | None) -> None:
    """Answer one message, or talk if there is none. Raises `EbbtideError`."""
    if message == "":
        raise InvalidRequest("is empty; write something", field="MESSAGE")
    gateway = target.connection()
    if message is not None:
        answer_once(ChatHistory(gateway, run_id, options), message)
        return
    card = gateway.get(f"/v1/models/{quote(run_id, safe='')}")
    newest = card.get("weight_version")
    about = f"run {card.get('id', run_id)}, {f'newest version {newest}' if newest else 'no version yet'}"
    talk(ChatHistory(gateway, run_id, options), f"{about}. Ctrl-C stops an answer, Ctrl-D ends the chat.")
