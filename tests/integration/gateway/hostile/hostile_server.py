"""A gateway in a process of its own, whose rollouts follow a script, for clients that would break it.

    python -m tests.integration.gateway.hostile.hostile_server READY_FILE PARENT

READY_FILE gets its address and the keys of three users. It dies with the process PARENT.

Its chat template takes twice as long for each level of a tool's schema. Invariant: the process remembers few rollouts,
so that what it takes is the gateway's own.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ebbtide.auth.credential_files import ReloadedFiles
from ebbtide.auth.role_tokens import key_id, mint
from ebbtide.auth.roles import Role
from ebbtide.auth.security import ClientSecurity
from ebbtide.gateway.__main__ import return_freed_memory
from ebbtide.gateway.access import KeyRing, RequestLimits
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.http.server import HttpServer
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.gateway.templates import TemplateLimits, TemplateSandbox
from ebbtide.runtime import die_with_parent
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.session import MeteredKey
from tests.fakes.model_texts import CHATML, byte_level_tokenizer, served_model
from tests.fakes.scripted_app_state import scripted_app_state
from tests.fakes.scripted_rollouts import MarkedOutputs, ScriptedCatalog, ScriptedSource, scripted_run

#: Small, so that a test reaches them soon.
LIMITS: Final = RequestLimits(
    body_bytes=1 << 20, bodies_bytes=4 << 20, body_s=1.0, header_s=1.0, messages=64, tools=16, requests_per_key=64
)
_TEMPLATE_CPU_S: Final = 0.2
_KEY_S: Final = 12 * 3600
_REMEMBERED: Final = 64
_SCHEMAS: Final = (
    "{% macro told(schema) %}{% if schema is mapping and schema['items'] is defined %}"
    "[{{ told(schema['items']) }}|{{ told(schema['items']) }}]{% else %}x{% endif %}{% endmacro %}"
    "{% for tool in tools or [] %}{{ told(tool.function.parameters or {}) }}{% endfor %}"
)


class ForgetfulSource(ScriptedSource):
    """Forgets all rollouts but the last."""

    async def submit_rollouts(
        self, rollouts: Sequence[RolloutRequest], *, wait: bool, key: MeteredKey | None = None
    ) -> None:
        await super().submit_rollouts(rollouts, wait=wait, key=key)
        for known in (self.submitted, self._texts):
            while len(known) > max(_REMEMBERED, len(rollouts)):
                del known[next(iter(known))]


async def serve(ready: Path) -> None:
    sandbox = TemplateSandbox(processes=2, limits=TemplateLimits(cpu_s=_TEMPLATE_CPU_S))
    model = served_model(byte_level_tokenizer(), sandbox, template=_SCHEMAS + CHATML, parsers=MarkedOutputs())
    source = ForgetfulSource(scripted_run(), model)
    signer = Ed25519PrivateKey.generate()
    known = {key_id(signer.public_key()): signer.public_key()}
    state = scripted_app_state(ScriptedCatalog([source]), KeyRing(None, ReloadedFiles((), lambda: known)), LIMITS)
    await state.directory.refresh()
    settings = GatewaySettings(security=ClientSecurity(token="unused"), listen="127.0.0.1:0", limits=LIMITS)
    server = HttpServer(make_app(state), settings)
    await server.start()
    beside = ready.with_suffix(".part")
    roles = (Role.AGENT, Role.AGENT, Role.USER)  # the last one ends sessions, too
    keys = [mint(signer, role, ttl_s=_KEY_S, name=f"user-{number}") for number, role in enumerate(roles)]
    beside.write_text(json.dumps({"address": server.address, "keys": keys}))
    beside.rename(ready)
    await server.ended()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    return_freed_memory()
    asyncio.run(serve(Path(sys.argv[1])))
