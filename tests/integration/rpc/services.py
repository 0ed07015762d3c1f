"""All services of the contracts on real servers, in a thread with its own event loop, for a whole module of tests."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import grpc

from ebbtide.auth.security import ServerSettings
from ebbtide.coordinator.service import Coordinator
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.rollout_worker.installs.peers import PeerBlobs, PeerServicer, add_to_server
from ebbtide.rpc.server import Server, Service
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.serving_guard.trainer_lender import TrainerLender
from ebbtide.transfer import BlobCache
from ebbtide.v1.weights_pb2_grpc import add_WeightsServicer_to_server
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.servicer import SERVICE as WEIGHTS
from ebbtide.weight_relay.settings import RelaySettings


class Noted:
    """A servicer whose methods tell `reached` their names before they begin."""

    def __init__(self, inner: Any, reached: list[str]) -> None:
        self._inner, self._reached = inner, reached

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def unary(request: Any, context: Any) -> Any:
            self._reached.append(name)
            return await method(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            self._reached.append(name)
            async for message in method(request, context):
                yield message

        return stream if inspect.isasyncgenfunction(method) else unary


class Services:
    """The servicers of coordinator, relay, guard and a worker that serves its peers, behind any number of servers."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.reached: list[str] = []
        self._folder, self._redis_url = folder, redis_url
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._services: list[Service] = []
        self._peer: list[Service] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work` in the loop of the services."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _open(self) -> None:
        coordinator = Coordinator(CoordinatorSettings(store_url=self._redis_url))
        self._stack.push_async_callback(coordinator.close)
        relay = WeightRelay(RelaySettings(data_dir=str(self._folder / "relay"), server=ServerSettings(token="unused")))
        await relay.open()
        self._stack.push_async_callback(relay.close)
        peer = PeerBlobs(BlobCache(1 << 20), lambda: None, 4)
        self._services = [
            *await coordinator.open(),
            (add_WeightsServicer_to_server, relay.servicer, WEIGHTS),
            *TrainerLender(GuardSettings(owner="trainer", grant_dir=str(self._folder / "grants"))).services,
        ]
        self._peer = [(add_to_server, PeerServicer(peer), WEIGHTS)]

    def serve(self, settings: ServerSettings, *, peer: bool = False) -> str:
        """The address of a server of all services; with `peer`, of the one that a worker serves."""

        async def start() -> str:
            chosen = self._peer if peer else self._services
            noted: list[Service] = [(add, Noted(servicer, self.reached), name) for add, servicer, name in chosen]
            server = Server(settings, noted)
            await server.start()
            self._stack.push_async_callback(server.stop, 0)
            return server.address

        return str(self.run(start()))

    def connect(self, target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        """A bare channel, which adds nothing to calls."""

        async def connect() -> grpc.aio.Channel:
            made = grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
            return await self._stack.enter_async_context(made)

        made: grpc.aio.Channel = self.run(connect())
        return made
