"""Versions are pulled, verified and installed, or refused; and no token is made by a version that its rollout
forbids."""

import asyncio
from typing import Any

import pytest

from ebbtide.rollout_worker.engine.checkpoint_facts import architecture
from ebbtide.types.fleet import EndCause
from ebbtide.types.run import Sampling
from ebbtide.types.weights import PolicyVersion
from tests.fakes.scripted_engine import ScriptedEngine
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py


async def test_rollouts_without_bounds_go_on_across_an_install(house: House) -> None:
    await house.worker(script={"install_s": 0.02})
    house.coordinator.assign("r1", Sampling(max_tokens=300))
    await wait_until(lambda: house.coordinator.length("r1") > 20)
    house.coordinator.install(house.relay.publish(2))
    installed = await house.coordinator.hear("installed", 2)
    assert installed.version.version == 2
    assert installed.pull_s > 0
    assert installed.pause_s >= 0.02
    await wait_until(lambda: "r1" in house.coordinator.finished)
    versions = house.coordinator.versions("r1")
    assert set(versions) == {1, 2}
    assert versions == sorted(versions)


async def test_an_install_waits_for_rollouts_that_forbid_it(house: House) -> None:
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=150), max_version=1)
    await wait_until(lambda: house.coordinator.length("r1") > 4)
    house.coordinator.install(house.relay.publish(2))
    await house.coordinator.hear("installed", 2)
    assert "r1" in house.coordinator.finished or house.coordinator.length("r1") >= 140
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert set(house.coordinator.versions("r1")) == {1}


async def test_a_waiting_install_gives_way_to_another_target(house: House) -> None:
    await house.worker()
    first = house.relay.manifests[1].version
    house.coordinator.assign("r1", Sampling(max_tokens=4000), max_version=1)
    await wait_until(lambda: house.coordinator.length("r1") > 4)
    house.coordinator.install(house.relay.publish(2))
    await wait_until(lambda: house.relay.served >= 8)
    house.coordinator.install(first)
    assert (await house.coordinator.hear("installed", 2)).version.version == 1
    assert set(house.coordinator.versions("r1")) == {1}


async def test_what_the_installed_version_may_not_generate_is_released(house: House) -> None:
    await house.worker()
    house.coordinator.assign("newer", Sampling(max_tokens=4), min_version=2)
    house.coordinator.assign("other", Sampling(max_tokens=4), policy="another")
    await wait_until(lambda: len(house.coordinator.released()) == 2)
    assert all(reason.startswith("version") for reason in house.coordinator.released().values())
    assert set(house.coordinator.causes().values()) == {EndCause.WRONG_VERSION}


async def test_nothing_is_generated_before_the_first_install(house: House) -> None:
    await house.worker(version=0)
    house.coordinator.assign("r1", Sampling(max_tokens=4))
    await wait_until(lambda: "r1" in house.coordinator.released())
    assert house.coordinator.length("r1") == 0


async def test_only_tiles_that_changed_are_fetched(house: House) -> None:
    await house.worker()
    assert house.relay.served == 4
    house.coordinator.install(house.relay.publish(2, changed_tiles=0))
    house.coordinator.install(house.relay.publish(2, changed_tiles=0))
    await house.coordinator.hear("installed", 2)
    before = house.relay.served
    house.coordinator.install(house.relay.publish(3, changed_tiles=1))
    await house.coordinator.hear("installed", 4)
    assert house.relay.served == before + 1


async def test_a_pull_survives_corrupt_tiles_and_a_relay_that_goes_away(house: House) -> None:
    await house.worker()
    house.relay.corrupt, house.relay.broken = 1, 2
    house.coordinator.install(house.relay.publish(2))
    await house.coordinator.hear("installed", 2)
    assert "install_failed" not in house.coordinator.heard


async def test_a_refused_version_leaves_the_old_one_serving(house: House) -> None:
    await house.worker(script={"refuse_version": 2})
    house.coordinator.assign("r1", Sampling(max_tokens=100))
    house.coordinator.install(house.relay.publish(2))
    failed = await house.coordinator.hear("install_failed")
    assert (failed.version.version, failed.run_id) == (2, "run-1")
    assert "as scripted" in failed.message
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert set(house.coordinator.versions("r1")) == {1}
    house.coordinator.install(house.relay.publish(3))
    await house.coordinator.hear("installed", 2)


async def test_a_version_that_the_relay_lacks_or_that_is_not_the_announced_one_is_refused(house: House) -> None:
    await house.worker()
    house.coordinator.install(PolicyVersion(policy="policy", version=9, root=b"x" * 32))
    failed = await house.coordinator.hear("install_failed")
    assert "9" in failed.message
    assert not failed.unreachable
    house.relay.publish(2)
    house.coordinator.install(PolicyVersion(policy="policy", version=2, parent=1, step=2, root=b"x" * 32))
    assert "announced" in (await house.coordinator.hear("install_failed", 2)).message


async def test_a_relay_that_is_away_for_too_long_is_told_from_a_version_that_cannot_be_had(house: House) -> None:
    await house.worker(pull_patience_s=0.2)
    house.relay.broken = 1000
    house.coordinator.install(house.relay.publish(2))
    assert (await house.coordinator.hear("install_failed")).unreachable


async def test_a_worker_reports_that_it_is_installing(house: House) -> None:
    await house.worker(script={"install_s": 0.3})
    house.coordinator.install(house.relay.publish(2))
    await asyncio.wait_for(house.coordinator.hear("installed", 2), 5)
    assert {beat.state for beat in house.coordinator.heard["heartbeat"]} >= {2, 3}


async def test_weights_of_another_architecture_are_refused_with_a_digest_of_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: dict[str, tuple[int, ...]] = {"weight": (256,)}
    monkeypatch.setattr(ScriptedEngine, "shapes", property(lambda _: shapes))
    await house.worker()
    fits = architecture(shapes)
    shapes["another"] = (1,)
    house.coordinator.install(house.relay.publish(2))
    failed = await house.coordinator.hear("install_failed")
    assert "another architecture" in failed.message
    assert failed.architecture == fits != architecture(shapes)
