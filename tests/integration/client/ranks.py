"""One rank of a trainer of four, its own process: publishes its shards of small models, with steps between.

    python ranks.py KINDS RANK PORT FOLDER RELAY [DIE]

KINDS: how the models are sharded, by commas; each is a run of that name. With DIE, the last rank is gone before it has
put its share of the second version. Rank 0 prints a line of JSON for each version, or for what went wrong, and writes
the gathered full tensors to FOLDER/KIND.VERSION.safetensors.
"""

import asyncio
import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.publisher.publisher import Authority
from ebbtide.client.publisher.torch_exchange import TorchExchange
from ebbtide.client.publisher.version_upload import VersionUpload
from ebbtide.client.relay_client import RelayClient
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import EbbtideError
from ebbtide.types.weights import PolicyVersion

SIZE = 4
SEED = bytes(range(32))


class Block(torch.nn.Module):
    """Odd sizes, so that shards are uneven and some are empty; a buffer that is no DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(37, 50, bias=True)
        self.down = torch.nn.Linear(50, 37, bias=False)
        self.norm = torch.nn.LayerNorm(3)  # fewer rows than ranks
        self.scale = torch.nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("steps", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x))) * self.scale
        out: torch.Tensor = self.norm(y[:, :3]).sum() + y.sum()
        return out


def make(kind: str) -> torch.nn.Module:
    torch.manual_seed(7)
    model = Block().to(torch.bfloat16) if kind == "fsdp" else Block()
    if kind in {"tensor", "both"}:
        shape, names = ((SIZE,), ("tp",)) if kind == "tensor" else ((2, 2), ("dp", "tp"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        if kind == "both":
            fully_shard(model, mesh=mesh["dp"])
    elif kind == "replicas":  # HSDP: shards within a group, replicas between them
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    return model


def state(model: torch.nn.Module, mesh: Any) -> dict[str, Any]:
    extra = torch.arange(60.0).reshape(4, 15)
    found = dict(model.state_dict())
    found["columns"] = distribute_tensor(extra, mesh, [Shard(1)])
    found["copies"] = distribute_tensor(extra + 1, mesh, [Replicate()])
    found["nothing"] = distribute_tensor(torch.zeros(0, 4), mesh, [Shard(0)])
    return found


def gathered(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def step(tensors: dict[str, Any]) -> None:
    """As an optimiser would: a few elements change by a little, and replicas alike."""
    for name, value in tensors.items():
        seed, local = 0, value
        if isinstance(value, DTensor):
            local, mine = value.to_local(), value.device_mesh.get_coordinate() or ()
            places = enumerate(zip(mine, value.placements, strict=True))
            seed = sum(at * 10**place for place, (at, how) in places if not how.is_replicate())
        if name == "steps" or not local.numel():
            continue
        mask = torch.rand(local.shape, generator=torch.Generator().manual_seed(seed)) < 0.03
        with torch.no_grad():
            local.add_(mask.to(local.dtype) * 0.5)


def tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def publish(kind: str, exchange: TorchExchange, peer: ServicePeer, folder: str, *, die: bool) -> None:
    """Versions 1, 2 (after a step) and 3 (nothing changed)."""
    numbers = iter((1, 2, 3))

    async def reserve() -> tuple[int, bytes]:
        return next(numbers), SEED

    async def announce(version: PolicyVersion) -> None:
        """Nobody waits for it."""

    authority = Authority(reserve, announce) if exchange.rank == 0 else None
    publisher = RelayClient(peer).publisher(kind, "policy", authority=authority, exchange=exchange)
    tensors = state(make(kind), init_device_mesh("cpu", (SIZE,)))
    for number in (1, 2, 3):
        if number == 2:
            step(tensors)
        full = gathered(tensors)
        if die and number == 2 and exchange.rank == SIZE - 1:
            VersionUpload._put = _end  # type: ignore[method-assign, assignment]
        publishing = await publisher.publish(tensors, step=number, parent=number - 1)
        await publishing
        report = publishing.report
        if exchange.rank == 0:
            save_file(full, f"{folder}/{kind}.{number}.safetensors")
            line = {"run": kind, "version": number, "kind": report.kind, "sent": report.bytes_sent}
            tell({**line, "dense": report.dense_bytes, "density": report.density})


async def _end(*_: object) -> None:
    os._exit(9)


async def main(kinds: str, rank: int, port: int, folder: str, address: str, die: bool) -> None:
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    exchange = TorchExchange(timeout_s=60.0)
    peer = ServicePeer("weight-relay", address, ClientSecurity(token=os.environ["EBBTIDE_TOKEN"]), patience_s=10.0)
    try:
        for kind in kinds.split(","):
            await publish(kind, exchange, peer, folder, die=die)
    except EbbtideError as error:
        tell({"error": type(error).__name__, "text": str(error)})
        os._exit(1)
    await peer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    kinds, rank, port, folder, address = sys.argv[1:6]
    asyncio.run(main(kinds, int(rank), int(port), folder, address, die=sys.argv[6:] == ["DIE"]))
