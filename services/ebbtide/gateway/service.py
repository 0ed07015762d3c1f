"""Builds the gateway, and runs it until it is asked to end.

Invariant: nothing that must survive is here. Requests are rollouts of the coordinator, which another gateway finds
again under the clients' ids; with this process only its answers under way are lost.
"""

import asyncio
import os
import socket
from typing import Final

from ebbtide.auth.role_tokens import run_of_token
from ebbtide.client import Client
from ebbtide.errors import EbbtideError
from ebbtide.gateway.access import RequestSlots
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.http.route import AppState
from ebbtide.gateway.http.server import HttpServer
from ebbtide.gateway.parsers import ParserNames
from ebbtide.gateway.prompt_threads import PromptThreads
from ebbtide.gateway.runs import RunCatalog, RunDirectory
from ebbtide.gateway.sessions.turn_player import SessionCache
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.gc_pauses import age_objects
from ebbtide.runtime import Shutdown
from ebbtide.telemetry import get_logger
from ebbtide.types.ids import new_fence

log = get_logger(__name__)
#: How often the runs are read again without a request, and leases that are not needed are released.
_REFRESH_S: Final = 5.0
#: Threads for prompts beyond those that wait for template processes: they encode texts meanwhile.
_MORE_THREADS: Final = 2


async def serve(shutdown: Shutdown, settings: GatewaySettings) -> None:
    """Serve clients until `shutdown` is requested, then let requests under way finish."""
    settings.checked()
    shutdown.spawn(age_objects(), "garbage")
    client = Client(settings.coordinator, security=settings.security, patience_s=settings.patience_s)
    sandbox = TemplateSandbox(processes=settings.template_processes)
    threads = PromptThreads(settings.template_processes + _MORE_THREADS, most_waiting=settings.limits.prompts_waiting)
    async with client:
        catalog = RunCatalog(
            client,
            sandbox,
            ParserNames(settings.tool_parser, settings.reasoning_parser),
            holder=settings.holder or own_holder(),
            model_roots=settings.model_roots,
            max_model_len=settings.max_model_len,
            bound_run=lambda: run_of_token(settings.security.bearer()),
        )
        directory = RunDirectory(
            catalog,
            threads=threads,
            max_prompt_tokens=settings.limits.prompt_tokens,
            idle_s=settings.idle_s,
        )
        cache = SessionCache(settings.sessions.shelf_bytes)
        state = AppState(
            keys=settings.key_ring(),
            limits=settings.limits,
            slots=RequestSlots(settings.limits),
            directory=directory,
            session_limits=settings.sessions,
            cache=cache,
            request_id_header=settings.door.request_id_header,
            is_leaving=shutdown.requested.is_set,
        )
        server = HttpServer(make_app(state), settings)
        await server.start()
        shutdown.spawn(_refresh(directory), "runs")
        shutdown.spawn(server.ended(), "http")
        shutdown.ready(server.address)
        await shutdown.requested.wait()
        await server.stop()
        cache.close()
        await directory.close()
    threads.close()
    await asyncio.to_thread(sandbox.close)


def own_holder() -> str:
    """A holder's name that no other gateway has: containers may share a host's name, and have the same process ids."""
    return f"{socket.gethostname()}-{os.getpid()}-{new_fence()}"


async def _refresh(directory: RunDirectory) -> None:
    """Keep the list of runs fresh. While the coordinator is away, requests wait for it."""
    while True:
        try:
            await directory.refresh()
        except EbbtideError as error:
            log.warning("the runs could not be read, trying again", reason=str(error))
        except Exception:
            log.exception("the runs could not be refreshed")
        await asyncio.sleep(_REFRESH_S)
