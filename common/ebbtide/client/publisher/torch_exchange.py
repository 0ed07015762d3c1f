"""The exchange of ranks that torch.distributed has brought together. torch is not imported: they have it already.

    exchange = TorchExchange()  # on every rank, behind init_process_group
    publisher = lease.publisher(exchange) if exchange.rank == 0 else client.publisher(run_id, exchange)
    publishing = await publisher.publish(model.state_dict(), step=step, parent=parent)  # local shards, on every rank
    ...  # the next step
    version = await publishing

Bytes travel as CPU tensors between rank 0 and each other rank, point to point, so that one that died keeps no other
from hearing of it.
"""

import contextlib
import sys
from datetime import timedelta
from typing import Any, Final

from ebbtide.errors import InvalidRequest, Unavailable

#: gloo's own; and torch's, of a group that was closed meanwhile.
_ERRORS: Final = (RuntimeError, ValueError)


class TorchExchange:
    """All ranks of torch's default process group, over a gloo group of its own: what NCCL does is not disturbed."""

    def __init__(self, *, timeout_s: float = 1800.0) -> None:
        """Every rank makes one, at the same point. `timeout_s`: how long a rank may encode and upload its share.

        Raises `InvalidRequest` before `torch.distributed.init_process_group`.
        """
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            raise InvalidRequest("call torch.distributed.init_process_group first", field="exchange")
        self._torch: Any = sys.modules["torch"]
        self._distributed = distributed
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank: int = distributed.get_rank()
        self.size: int = distributed.get_world_size()

    def close(self) -> None:
        """Free the group, on this rank alone; each does so, when it likes.

        A call under way keeps what it needs, and raises `Unavailable` once the other rank has closed its own, or its
        time is up; a later one does so at once.
        """
        with contextlib.suppress(ValueError):  # closed before, or ended with torch's default group
            self._distributed.destroy_process_group(self._group)

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0: what each rank gave; elsewhere nothing. Raises `Unavailable` naming a rank that is gone."""
        if self.rank:
            self._send(data, 0)
            return []
        return [data, *(self._receive(rank) for rank in range(1, self.size))]

    def broadcast(self, data: bytes) -> bytes:
        """What rank 0 gave. Raises `Unavailable` once all that are there have been told."""
        if self.rank:
            return self._receive(0)
        gone: list[Unavailable] = []
        for rank in range(1, self.size):
            try:
                self._send(data, rank)
            except Unavailable as error:
                gone.append(error)
        if gone:
            raise gone[0]
        return data

    def _send(self, data: bytes, to: int) -> None:
        size = self._torch.tensor([len(data)], dtype=self._torch.int64)
        try:
            self._distributed.send(size, to, group=self._group)
            if data:
                payload = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
                self._distributed.send(payload, to, group=self._group)
        except _ERRORS as error:
            raise _gone(to, error) from None

    def _receive(self, source: int) -> bytes:
        size = self._torch.zeros(1, dtype=self._torch.int64)
        try:
            self._distributed.recv(size, source, group=self._group)
            payload = self._torch.empty(int(size), dtype=self._torch.uint8)
            if len(payload):
                self._distributed.recv(payload, source, group=self._group)
        except _ERRORS as error:
            raise _gone(source, error) from None
        return bytes(payload.numpy())


def _gone(rank: int, error: Exception) -> Unavailable:
    cause = str(error).partition(". ")[0]
    return Unavailable(f"rank {rank} of the trainer is gone or silent ({cause}); start the trainer again")
