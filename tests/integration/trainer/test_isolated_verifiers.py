"""Verifiers run in processes without the driver's rights; what they do wrong drops one session alone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from ebbtide.driver.environment_host import BranchText
from ebbtide.driver.host_process import HostProcess, IsolationRefused, host_plan
from ebbtide.driver.service import drive
from ebbtide.driver.verdicts import VerdictFailed, VerifierProcesses
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import load_conversations
from ebbtide.runtime import race
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import EnvironmentSpec, RunSpec
from ebbtide.types.session import UnverifiedSession
from ebbtide.types.tokens import pack_ids, pack_tokens
from tests.integration.trainer.test_isolated_environments import TOKEN, settings
from tests.unit.trainer.conftest import Cluster, FakeClient, FakeLease

VERIFIERS = {"exact": "verifier_probe:exact", "told": "verifier_probe:told"}
LIMIT_S = 20.0


@pytest.fixture
async def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VerifierProcesses]:
    monkeypatch.setenv("EBBTIDE_TOKEN", TOKEN)
    made = settings(tmp_path)
    try:
        await (await HostProcess.start(made, host_plan(made))).end()
    except IsolationRefused as refused:
        pytest.skip(f"this host does not allow isolation: {refused}")
    processes = VerifierProcesses(VERIFIERS, made, host_plan(made))
    await processes.load()
    yield processes
    await processes.close()


async def reward(verifiers: VerifierProcesses, name: str, limit_s: float = LIMIT_S, **data: str) -> float:
    branch = BranchText((("spell 'on'", False), ("no", True)), truncated=False)
    return await verifiers.reward(name, [branch], msgspec.json.encode(data), limit_s)


async def test_a_verifier_reads_the_session_and_what_its_client_gave(verifiers: VerifierProcesses) -> None:
    assert await reward(verifiers, "exact", answer="no") == 1.0
    assert await reward(verifiers, "exact", answer="on") == 0.0


async def test_what_goes_wrong_in_a_verifier_is_told_and_the_next_session_is_judged(
    verifiers: VerifierProcesses, tmp_path: Path
) -> None:
    for deed, why, reason in (
        ("raise", "no such problem", "verifier_failed"),
        ("text", "could not convert", "verifier_failed"),
        ("infinite", "no finite reward", "verifier_failed"),
        ("exit", "status 3", "verifier_failed"),
        ("hang", "more than 0.5 s", "verifier_timeout"),
    ):
        with pytest.raises(VerdictFailed, match=why) as failed:
            await reward(verifiers, "told", 0.5 if deed == "hang" else LIMIT_S, deed=deed)
        assert failed.value.reason == reason
        assert await reward(verifiers, "told", deed="judge") == 0.5
    with pytest.raises(VerdictFailed):
        await reward(verifiers, "told", deed="read", path=str(tmp_path / "token"))
    with pytest.raises(VerdictFailed, match="no verifier 'other'"):
        await reward(verifiers, "other")


async def test_a_session_too_long_for_a_verifier_is_not_sent(verifiers: VerifierProcesses) -> None:
    branch = BranchText((("x" * (4 << 20), True),), truncated=False)
    with pytest.raises(VerdictFailed, match="characters"):
        await verifiers.reward("exact", [branch], b"{}", LIMIT_S)


async def test_a_verifier_that_cannot_be_imported_is_named_when_the_run_begins(tmp_path: Path) -> None:
    made = settings(tmp_path, trust=True)
    processes = VerifierProcesses({"gone": "nowhere_to_be_found:it"}, made, host_plan(made))
    with pytest.raises(InvalidRequest, match=r"environment\.verifiers\.gone: cannot be loaded"):
        await processes.load()
    await processes.close()


class JudgedLease(FakeLease):
    """The driver's lease of a run with one session that waits."""

    def __init__(self, cluster: Cluster, session: UnverifiedSession) -> None:
        super().__init__(cluster, "driver")
        self.session = session
        self.verdict: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()

    async def unverified(self) -> AsyncIterator[UnverifiedSession]:
        yield self.session
        await self.lost.wait()

    async def post_verdict(self, session_id: str, *, reward: float | None, drop_reason: str) -> None:
        assert (session_id, drop_reason) == ("s", "")
        self.verdict.set_result(reward)


async def test_the_driver_of_a_run_with_verifiers_judges_its_sessions(tiny_model: Path, tmp_path: Path) -> None:
    spec = RunSpec(
        name="run", model=str(tiny_model), environment=EnvironmentSpec(name="agents", verifiers=VERIFIERS), output="/x"
    )
    sampled = load_conversations(str(tiny_model))
    ids = [token for token in range(5, 9) if token not in sampled.end_ids]
    trajectory = Trajectory(
        episode_id="s.0",
        group_id="g",
        step=0,
        group_size=1,
        prompt_ids=pack_ids([1]),
        tokens=pack_tokens(ids, [-1.0] * len(ids), 1),
        loss_mask=b"\x01" * len(ids),
        reward=0.0,
    )
    data = msgspec.json.encode({"answer": sampled.text(ids)})
    session = UnverifiedSession(session_id="s", verifier="exact", data=data, trajectories=(trajectory,))
    cluster = Cluster(spec, lambda _request: None)
    lease, client = JudgedLease(cluster, session), FakeClient(cluster)
    made = settings(tmp_path, trust=True, allowed=("verifier_probe:*",))
    driving = drive(client, lease, msgspec.structs.replace(made, output_roots=("/",)))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await race(driving, lease.verdict)
        assert await lease.verdict == 1.0
