"""What both users need: a channel with their token, a run with its lease, and requests."""

import os
from typing import Any, Final

from ebbtide.auth.security import ClientSecurity
from ebbtide.rpc.channel import open_channel
from ebbtide.types.rollout import RolloutKind, RolloutRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec, Sampling
from ebbtide.types.tokens import pack_ids
from ebbtide.v1 import rollouts_pb2, rollouts_pb2_grpc, runs_pb2, runs_pb2_grpc, types_pb2
from ebbtide.wire import to_proto

#: Variable with the token of a program's user.
TOKEN: Final = "EBBTIDE_TENANT_TOKEN"  # noqa: S105 - its name
PROMPT: Final = pack_ids(range(1, 65))
DEADLINE_S: Final = 30.0


class User:
    """A user's connection."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address, ClientSecurity(token=os.environ[TOKEN]))
        self.runs: Any = runs_pb2_grpc.RunsStub(self.channel)
        self.rollouts: Any = rollouts_pb2_grpc.RolloutsStub(self.channel)

    async def run(self, run_id: str, *, version: bool = True) -> runs_pb2.LeaseRef:
        """Submit a run, claim it, and announce a first version. Returns the lease."""
        spec = to_proto(RunSpec(name="run", model="m", environment=EnvironmentSpec(name="e")), types_pb2.RunSpec)
        request = runs_pb2.SubmitRunRequest(run_id=run_id, spec=spec)
        await self.runs.SubmitRun(request, timeout=DEADLINE_S)
        claim = runs_pb2.ClaimRunRequest(run_id=run_id, role="trainer", holder="host")
        lease: runs_pb2.LeaseRef = (await self.runs.ClaimRun(claim, timeout=DEADLINE_S)).ref
        if version:
            number = (await self.runs.ReserveVersion(lease, timeout=DEADLINE_S)).version
            record = types_pb2.PolicyVersion(policy="policy", version=number, root=bytes([number]) * 32)
            announcement = runs_pb2.AnnounceVersionRequest(lease=lease, version=record)
            await self.runs.AnnounceVersion(announcement, timeout=DEADLINE_S)
        return lease


def submission(lease: runs_pb2.LeaseRef, *rollout_ids: str) -> rollouts_pb2.SubmitRequest:
    rollouts = [
        to_proto(
            RolloutRequest(
                rollout_id=name,
                group_id="g",
                episode_id=f"e.{name}",
                prompt_ids=PROMPT,
                sampling=Sampling(max_tokens=256),
                kind=RolloutKind.TRAIN,
            ),
            rollouts_pb2.RolloutRequest,
        )
        for name in rollout_ids
    ]
    return rollouts_pb2.SubmitRequest(lease=lease, rollouts=rollouts)
