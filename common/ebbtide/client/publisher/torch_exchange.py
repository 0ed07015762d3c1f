"""Connects ranks through torch.distributed. torch is not imported here: the ranks have imported it.

    exchange = TorchExchange()  # on every rank, after init_process_group
    publisher = lease.publisher(exchange) if exchange.rank == 0 else client.publisher(run_id, exchange)
    publishing = await publisher.publish(model.state_dict(), step=step, parent=parent)  # local shards, on every rank
    ...  # the next step
    version = await publishing

Bytes travel as CPU tensors between rank 0 and each other rank, point to point, so that a dead rank does not cut off the
others.
"""

import contextlib
import sys
from datetime import timedelta
from typing import Any, Final

from ebbtide.errors import InvalidRequest, Unavailable

#: gloo's errors, and torch's for a group that was closed meanwhile.
_ERRORS: Final = (RuntimeError, ValueError)


class TorchExchange:
    """Connects all ranks of torch's default process group over its own gloo group, which does not disturb NCCL."""

    def __init__(self, *, timeout_s: float = 1800.0) -> None:
        """Every rank makes one, at the same point. A rank can encode and upload its share for `timeout_s`.

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
        """Free the group on this rank only, at any time.

        A running call raises `Unavailable` once the other rank has closed its group or the time is up; later calls do
        so at once.
        """
        with contextlib.suppress(ValueError):  # already closed, or destroyed with torch's default group
            self._distributed.destroy_process_group(self._group)

    def gather(self, data: bytes) -> list[bytes]:
        """As `RankExchange.gather`. Raises `Unavailable` naming a rank that is gone."""
        if self.rank:
            self._send(data, 0)
            return []
        return [data, *(self._receive(rank) for rank in range(1, self.size))]

    def broadcast(self, data: bytes) -> bytes:
        """As `RankExchange.broadcast`. Raises `Unavailable` after all reachable ranks have the data."""
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
