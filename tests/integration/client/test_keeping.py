"""A trainer that keeps its last version beside its tensors publishes what one publishes that copies all of them."""

from typing import Any

import pytest
import torch

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import InvalidRequest
from ebbtide.trainer.learning.gpu_changes import KeptTensor
from tests.integration.client.models import Model, keeper, model, same, step
from tests.integration.client.reader import TOKEN, Reader


async def read(relay: str, version: int) -> Model:
    """What one reads who comes then."""
    reader = Reader(ServicePeer("weight-relay", relay, ClientSecurity(token=TOKEN), patience_s=5.0), "run")
    found = await reader.read(version)
    reader.close()
    return found


async def test_a_keeper_of_tensors_publishes_the_same_and_follows_what_stays_of_one_kind(
    both: Client, relay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, follow = list[bool](), KeptTensor.follow

    def spy(self: KeptTensor, tensor: torch.Tensor) -> bool:
        followed.append(follow(self, tensor))
        return followed[-1]

    monkeypatch.setattr(KeptTensor, "follow", spy)
    versions = [model()]
    for number in range(3):
        versions.append(step(versions[-1], seed=number))
    other = {**versions[-1], "norm": torch.ones(3), "scalar": torch.tensor(3.0).double()}
    reports, sent, known = [], list[int](), list[list[bool]]()
    for given in (keeper, dict):
        async with both.claim("run") as lease:  # another's first version has no base
            for number, weights in enumerate([*versions, other, step(other)]):
                publishing = await lease.publishing(given(weights), step=number)
                version = await publishing
                assert same(await read(relay, version.version), weights)
                report = publishing.report
                reports.append((report.kind, report.density))
                sent.append(report.bytes_sent)
                known.append(list(followed))
                followed.clear()
    assert reports[:6] == reports[6:]
    assert all(sent[:6])
    assert all(again in {0, once} for once, again in zip(sent[:6], sent[6:], strict=True))  # 0: it has these blobs
    assert [kind for kind, _ in reports[:6]] == ["keyframe", "patch", "patch", "patch", "keyframe", "patch"]
    assert known == [[], *[[True] * 5] * 3, [True, True, False, False, True], [True] * 5, *[[]] * 6]


async def test_what_the_way_of_a_version_that_failed_left_behind_is_not_followed(
    both: Client, relay: str, script: Any
) -> None:
    weights = [model(), step(model()), step(model(), seed=2)]
    async with both.claim("run") as lease:
        await lease.publish(keeper(weights[0]), step=0)
        script.errors["AnnounceVersion"] = [InvalidRequest("not this one", field="version")]
        publishing = await lease.publishing(keeper(weights[1]), step=1)
        with pytest.raises(InvalidRequest, match="not this one"):
            await publishing
        script.errors["ReserveVersion"] = [InvalidRequest("nor this", field="version")]
        with pytest.raises(InvalidRequest, match="nor this"):
            await lease.publishing(keeper(weights[0]), step=2)
        third = await lease.publishing(keeper(weights[2]), step=3)
        version = await third
        assert (third.report.kind, third.report.base) == ("patch", 1)
    assert same(await read(relay, version.version), weights[2])
