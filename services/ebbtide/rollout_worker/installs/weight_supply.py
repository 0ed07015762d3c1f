"""Where this worker's weights come from, and to whom they go on: all the parts of it, put together."""

from pathlib import Path
from typing import Final

from ebbtide.rollout_worker.engine import Engine
from ebbtide.rollout_worker.engine.vllm.cpu_build import is_cpu_build
from ebbtide.rollout_worker.installs.peer_blobs import PeerBlobs
from ebbtide.rollout_worker.installs.relay_presence import RelayPresence
from ebbtide.rollout_worker.installs.version_store import VersionStore
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.rollout_worker.shared_host import host_name
from ebbtide.transfer import BlobCache, Puller, opener
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.weights import Holder
from ebbtide.v1.weights_pb2_grpc import WeightsStub

_MIB: Final = 1 << 20
#: Of threads that work beside somebody else's engine: they get what is left of the cores.
_NICENESS: Final = 19


class WeightSupply:
    def __init__(self, settings: WorkerSettings, worker_id: str, engine: Engine, stub: WeightsStub) -> None:
        self._settings, self._worker_id = settings, worker_id
        folder = Path(settings.mirror_dir) if settings.mirror_dir else None
        self._host = host_name(folder) if folder else ""
        cache = BlobCache(settings.peer_cache_mib * _MIB)
        self.threads = threads_for(settings)
        self.puller = puller = Puller(
            stub,
            settings.relay,
            holder=self.holder,
            patience_s=settings.pull_patience_s,
            open_source=opener(settings.client),
            cache=cache if settings.peer_listen else None,
            threads=self.threads,
        )
        self.weights = VersionStore(
            engine, puller, folder, in_place=_in_place(settings), patience_s=settings.pull_patience_s
        )
        self.shelf = PeerBlobs(cache, lambda: self.weights.mirror, settings.peer_readers)
        self.presence = RelayPresence(puller, self.weights)

    def holder(self) -> Holder:
        """This worker, as it is told to relays."""
        return Holder(
            name=self._worker_id,
            site=self._settings.site,
            # Who shares memory with nobody must not be taken to: then others would wait for what it fetches.
            host=self._host if self.weights.shared else f"worker:{self._worker_id}",
            address=self.shelf.address,
            lasting=self._settings.kind is WorkerKind.RESERVED,
            readers=self.shelf.streams.total(),
        )

    def close(self) -> None:
        self.weights.close()
        self.puller.close()


def threads_for(settings: WorkerSettings) -> DigestThreads:
    """For digests and patches. A pull waits for no grant: so a borrowed worker's have the lowest priority, and are no
    more than one where the served engine computes on the same cores."""
    if settings.kind is not WorkerKind.BORROWED:
        return DigestThreads()
    on_cores = settings.engine == "vllm" and is_cpu_build()
    return DigestThreads(1, niceness=_NICENESS) if on_cores else DigestThreads(niceness=_NICENESS)


def _in_place(settings: WorkerSettings) -> bool:
    """Whether the engine applies changes to weights where they are. CPU builds load packed copies of them."""
    return settings.engine == "vllm" and not is_cpu_build()
