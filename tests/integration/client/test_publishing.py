"""Versions are published as what changed, from a copy, in order, and whatever happens to the relay meanwhile."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client, SyncClient
from ebbtide.client.publisher.rank_exchange import SingleRank
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import InvalidRequest, LeaseSuperseded, NotReady, Unavailable
from ebbtide.types.weights import PolicyVersion
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weights import NamedTensor, Signer, named_tensor
from tests.integration.client.models import GIVEN, Given, model, noise, same, step
from tests.integration.client.reader import Reader
from tests.support.waiting import wait_until

SECURITY = ClientSecurity(token="a-token-of-tests")
SEED = bytes(range(32))


def announced(script: Any) -> list[int]:
    return [request.version.version for request in script.calls("AnnounceVersion")]


@GIVEN
async def test_what_changed_is_sent_and_read_bit_for_bit_by_who_follows_and_by_who_comes_late(
    given: Given, both: Client, relay: str, reader: Reader
) -> None:
    versions = [model()]
    for number in range(3):
        versions.append(step(versions[-1], seed=number))
    async with both.claim("run") as lease:
        for number, weights in enumerate(versions):
            publishing = await lease.publishing(given(weights), step=number, parent=number)
            version = await publishing
            report = publishing.report
            assert (version.version, report.version) == (number + 1, version)
            assert same(await reader.read(version.version), weights)
            dense = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
            assert report.dense_bytes == dense
            assert min(report.pause_s, report.encode_s, report.upload_s) > 0
            if number == 0:
                assert (report.kind, report.base, report.bytes_sent, report.density) == ("keyframe", 0, dense, 1.0)
            else:
                assert (report.kind, report.base) == ("patch", number)
                assert 0 < report.bytes_sent < dense / 15
                assert 0.02 < report.density < 0.04
                assert reader.pulled.bytes == report.bytes_sent
    late = Reader(ServicePeer("weight-relay", relay, SECURITY, patience_s=5.0), "run")
    assert same(await late.read(0), versions[-1])
    late.close()


@GIVEN
async def test_tensors_may_change_as_soon_as_they_are_copied(given: Given, both: Client, reader: Reader) -> None:
    weights = model()
    copies = [{name: tensor.clone() for name, tensor in weights.items()}]
    async with both.claim("run") as lease:
        for number in range(3):
            publishing = await lease.publishing(given(weights), step=number)
            for tensor in weights.values():
                tensor.mul_(1.5 if number else 2.0)
            version = await publishing
            assert same(await reader.read(version.version), copies[-1])
            copies.append({name: tensor.clone() for name, tensor in weights.items()})


async def test_versions_go_one_after_another_and_are_announced_in_order(both: Client, script: Any) -> None:
    weights = [model()]
    for number in range(4):
        weights.append(step(weights[-1], seed=number))
    async with both.claim("run") as lease:
        ways = await asyncio.gather(*(lease.publishing(one, step=at) for at, one in enumerate(weights)))
        versions = [await way for way in ways]
    assert [version.step for version in sorted(versions, key=lambda one: one.version)] == [0, 1, 2, 3, 4]
    assert announced(script) == [1, 2, 3, 4, 5]
    assert [way.report.kind for way in ways] == ["keyframe", *["patch"] * 4]


async def test_every_kind_of_tensor_is_taken_whole_or_in_pieces(both: Client, reader: Reader) -> None:
    bits = np.arange(24, dtype="u2").reshape(4, 6)

    def tensors(change: int) -> Iterator[NamedTensor | tuple[str, Any]]:
        now = bits + change
        yield named_tensor("brain", now, dtype="BF16")
        for start in (0, 3):
            piece = named_tensor("pieces", now[:, start : start + 3], dtype="BF16")
            yield NamedTensor(name="pieces", dtype="BF16", shape=(4, 3), data=piece.data, start=(0, start), full=(4, 6))
        yield "numpy", now.astype(">i4")
        yield "parameter", torch.nn.Parameter(torch.full((2, 3), float(change)))
        yield "eight", torch.arange(8.0).to(torch.float8_e4m3fn)
        yield "flag", np.bool_(change > 0)

    async with both.claim("run") as lease:
        for change in (0, 1):
            await lease.publish(tensors(change), step=change)
            found = await reader.read(change + 1)
            expected = torch.from_numpy((bits + change).astype("i2")).view(torch.bfloat16)
            assert torch.equal(found["brain"].view(torch.int16), expected.view(torch.int16))
            assert torch.equal(found["pieces"].view(torch.int16), expected.view(torch.int16))
            assert found["numpy"].tolist() == (bits + change).tolist()
            assert found["parameter"].tolist() == [[change] * 3] * 2
            assert (found["eight"].dtype, bool(found["flag"])) == (torch.float8_e4m3fn, change > 0)


@GIVEN
@pytest.mark.parametrize("why", ["another shape", "another name", "another order", "another dtype", "all changed"])
async def test_where_a_patch_leads_nowhere_all_is_published(
    given: Given, why: str, both: Client, reader: Reader
) -> None:
    first, second = model(), step(model())
    norm = second.pop("norm")
    match why:
        case "another shape":
            second["norm"] = norm.reshape(8, 8)
        case "another name":
            second["norm.weight"] = norm
        case "another order":
            second["norm"] = norm
        case "another dtype":
            second["norm"] = norm.to(torch.float16)
        case "all changed":
            first, second = noise(1), noise(2)
    async with both.claim("run") as lease:
        await lease.publish(given(first), step=0)
        publishing = await lease.publishing(given(second), step=1)
        await publishing
        assert (publishing.report.kind, publishing.report.base) == ("keyframe", 0)
        third = await lease.publishing(given(second), step=2)
        await third
        assert (third.report.kind, third.report.base) == ("patch", 2)
        assert (third.report.bytes_sent, third.report.density) == (0, 0.0)
    assert same(await reader.read(3), second)


@GIVEN
async def test_a_relay_that_lost_the_base_is_given_all_of_the_version(
    given: Given, both: Client, server: Any, reader: Reader
) -> None:
    weights = [model(), step(model()), step(model(), seed=2)]
    async with both.claim("run") as lease:
        await lease.publish(given(weights[0]), step=0)
        await server.forget()
        publishing = await lease.publishing(given(weights[1]), step=1)
        await publishing
        assert (publishing.report.kind, publishing.report.bytes_sent) == ("keyframe", publishing.report.dense_bytes)
        assert same(await reader.read(2), weights[1])
        assert (await lease.publish(given(weights[2]), step=2)).version == 3
        assert same(await reader.read(3), weights[2])


@pytest.mark.parametrize("patched", [False, True])
async def test_a_relay_that_starts_again_in_between_gets_the_rest(
    patched: bool, both: Client, server: Any, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, put = list[bytes](), VersionIntake.put
    restarting: list[asyncio.Task[None]] = []

    async def restart() -> None:
        await server.stop()
        await server.start()

    async def spy(self: VersionIntake, digest: bytes, data: bytes) -> None:
        seen.append(digest)
        if len(seen) == 2:
            restarting.append(asyncio.create_task(restart()))
        await put(self, digest, data)

    first, second = model(), step(model(), 0.2)
    async with both.claim("run") as lease:
        if patched:
            await lease.publish(first, step=0)
        monkeypatch.setattr(VersionIntake, "put", spy)
        publishing = await lease.publishing(second, step=1)
        version = await publishing
        assert publishing.report.kind == ("patch" if patched else "keyframe")
    assert restarting
    assert same(await reader.read(version.version), second)


@GIVEN
async def test_a_relay_that_is_away_is_named_and_its_return_is_made_use_of(
    given: Given, coordinator: Any, server: Any, script: Any, reader: Reader
) -> None:
    script.ttl_s = 60.0
    weights = [model(), step(model()), step(model(), seed=2)]
    patience_s = 2.0  # gRPC lets more than a second pass before it connects again
    client = Client(coordinator.address, server.address, security=SECURITY, patience_s=patience_s)
    async with client, client.claim("run") as lease:
        await lease.publish(given(weights[0]), step=0)
        await server.stop()
        publishing = await lease.publishing(given(weights[1]), step=1)
        with pytest.raises(NotReady, match="still on its way"):
            _ = publishing.report
        with pytest.raises(Unavailable, match="weight-relay"):
            await publishing
        await server.start()
        third = await lease.publishing(given(weights[2]), step=2)
        version = await third
        assert (third.report.kind, third.report.base) == ("patch", 1)
    assert announced(script) == [1, 3]
    assert same(await reader.read(version.version), weights[2])


async def test_what_cannot_be_published_is_named_and_leaves_the_base_as_it_was(both: Client, script: Any) -> None:
    weights = model()
    wrong: list[tuple[Any, str]] = [
        ({**weights, "norm": torch.zeros(3, dtype=torch.complex64)}, "norm"),
        ({**weights, "norm": np.array([object()])}, "norm"),
        ({**weights, "norm": torch.zeros(3, device="meta")}, "norm"),
        ({**weights, "../norm": torch.zeros(3)}, "tensors.name"),
        ([*weights.items(), ("norm", weights["norm"])], "norm"),
        ([NamedTensor(name="w", dtype="F32", shape=(3,), data=memoryview(bytes(8)))], "w"),
        ([*weights.items(), "norm"], "tensors"),
        ([("pieces", named_tensor("pieces", np.ones(2)))][:0], "tensors"),
    ]
    async with both.claim("run") as lease:
        await lease.publish(weights, step=0)
        for tensors, field in wrong:
            with pytest.raises(InvalidRequest) as caught:
                await lease.publish(tensors, step=1)
            assert caught.value.field == field
        half = NamedTensor(name="half", dtype="U8", shape=(2,), data=memoryview(bytes(2)), start=(0,), full=(4,))
        with pytest.raises(InvalidRequest, match="half: is not all of"):
            await lease.publish([half], step=1)
        publishing = await lease.publishing(step(weights), step=1)
        await publishing
        assert (publishing.report.kind, publishing.report.base) == ("patch", 1)
    assert announced(script) == [1, publishing.number]


@GIVEN
async def test_a_publish_that_is_cancelled_spoils_nothing(
    given: Given, both: Client, reader: Reader, script: Any
) -> None:
    weights = [model(), step(model()), step(model(), seed=2), step(model(), seed=3)]
    async with both.claim("run") as lease:
        await lease.publish(given(weights[0]), step=0)
        cut = asyncio.create_task(lease.publish(given(weights[1]), step=1))
        await wait_until(lambda: len(script.calls("ReserveVersion")) == 2, interval=0.0005)
        cut.cancel()
        await asyncio.wait({cut})
        for at in (2, 3):
            version = await lease.publish(given(weights[at]), step=at)
            assert same(await reader.read(version.version), weights[at])


async def test_a_lease_that_is_left_waits_for_the_version_on_its_way(both: Client, script: Any) -> None:
    async with both.claim("run") as lease:
        publishing = await lease.publishing(model(), step=0)
    assert publishing.done
    assert announced(script) == [publishing.number]


async def test_a_superseded_trainers_version_is_not_announced(both: Client, script: Any, reader: Reader) -> None:
    async with both.claim("run") as lease:
        publishing = await lease.publishing(model(), step=0)
        script.fence = "fence-of-another"
        with pytest.raises(LeaseSuperseded):
            await publishing
        with pytest.raises(LeaseSuperseded):
            await lease.publishing(model(), step=1)
    assert not script.calls("AnnounceVersion") or announced(script) == [1]  # refused there, by its fence


async def test_a_lease_has_one_publisher_and_refuses_another_exchange_for_it(both: Client) -> None:
    async with both.claim("run") as lease:
        await lease.publish(model(), step=0)
        with pytest.raises(InvalidRequest, match="exchange"):
            lease.publisher(SingleRank())
        assert lease.publisher() is lease.publisher()
    async with both.claim("run") as lease:
        exchange = SingleRank()
        assert lease.publisher(exchange) is lease.publisher(exchange)
        with pytest.raises(InvalidRequest, match="exchange"):
            lease.publisher(SingleRank())
        assert (await lease.publish(model(), step=1)).step == 1


async def test_versions_are_signed_by_the_runs_key(both: Client, script: Any, reader: Reader) -> None:
    script.seed = SEED
    async with both.claim("run") as lease:
        for at in range(2):
            await lease.publish(step(model(), seed=at), step=at)
            await reader.read(at + 1)
            assert reader.manifest.publisher == Signer(SEED).public


async def test_the_synchronous_face_publishes_beside_the_next_step(coordinator: Any, relay: str, script: Any) -> None:
    script.ttl_s = 60.0

    def work() -> tuple[PolicyVersion, str]:
        client = SyncClient(coordinator.address, relay, security=SECURITY, patience_s=10.0)
        with client, client.claim("run") as lease:
            lease.publish(model(), step=0)
            publishing = lease.publishing(step(model()), step=1)
            return publishing.result(), publishing.report.kind

    version, kind = await asyncio.to_thread(work)
    assert (version.version, version.step, kind) == (2, 1, "patch")
