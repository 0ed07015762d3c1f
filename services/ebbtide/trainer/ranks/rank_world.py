"""Joins the ranks that compute together, and sums values over them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from ebbtide.claimed_runs.run_loop import RankLost
from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.trainer.ranks.rank_place import RankPlace

#: Time for all ranks to join: people may start them by hand on several hosts.
_JOIN: Final = timedelta(minutes=5)
#: Time for one collective, in which ranks wait at most for each other's micro-batches. `rank_pulse` notices lost or
#: frozen ranks long before.
_COLLECTIVE: Final = timedelta(minutes=30)


class RankWorld:
    """The joined ranks. All ranks construct it together, once in a process."""

    def __init__(self, place: RankPlace, device: str) -> None:
        """`device`: cpu, or cuda for the GPU with this rank's number on its host.

        Raises `InvalidRequest` without such a device, and `RankLost` unless all ranks join.
        """
        self.rank, self.size = place.rank, place.size
        self.device = f"cuda:{place.local_rank}" if device == "cuda" else device
        if device == "cuda" and place.local_rank >= torch.cuda.device_count():
            text = f"rank {place.rank} has no GPU: this host has {torch.cuda.device_count()}; start fewer ranks on it"
            raise InvalidRequest(text, field="ranks")
        self.settle()
        try:
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=_store(place), rank=place.rank, world_size=place.size, timeout=_COLLECTIVE
            )
            self.mesh: DeviceMesh = init_device_mesh(device, (place.size,))
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise RankLost(f"the {place.size} ranks did not come together at {where} ({first_line(error)})") from None

    def settle(self) -> None:
        """Selects the rank's CUDA device in the calling thread; each thread has its own selection."""
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over all ranks, which all call this with as many values."""
        sums = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found


def _store(place: RankPlace) -> Any:
    """Connects to the store where the ranks meet: rank 0's, or torchrun's."""
    if place.listening is None:
        return next(rendezvous("env://", timeout=_JOIN))[0]
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place.size,
        is_master=True,
        timeout=_JOIN,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=place.listening,
    )


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def is_lost(error: BaseException) -> bool:
    """Whether torch reports that a rank did not answer. gloo's errors are plain `RuntimeError`s."""
    kinds: Any = (dist.DistError,)
    text = str(error)
    return isinstance(error, kinds) or "gloo" in text or "Connection reset" in text or "Connection closed" in text


@contextmanager
def computing() -> Iterator[None]:
    """Raises `RankLost` for errors of torch that mean that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if is_lost(error):
            raise RankLost(f"another rank is gone ({first_line(error)})") from None
        raise


@contextmanager
def exchanging() -> Iterator[None]:
    """Raises `RankLost` if an exchange of orders finds no answer."""
    try:
        yield
    except Unavailable as error:
        raise RankLost(str(error)) from None
