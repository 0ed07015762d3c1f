"""Each cloud's notice ends in a drain; whatever else its metadata server does ends in nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from aiohttp import web

from ebbtide.errors import InvalidRequest
from ebbtide.ledger import read_ledger
from ebbtide.rollout_worker.notices import Notice, PreemptionProbe, ScheduledEventsProbe, SpotProbe, watch
from ebbtide.types.run import Sampling
from tests.integration.rollout_worker.clouds import Aws, Azure, Cloud, Gcp
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
Expected = Callable[[int], list[int]]
CLOUDS: dict[Any, type[Any]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class Watched:
    """A cloud, and what a worker there was told."""

    def __init__(self, name: Any, cloud: Any) -> None:
        self.name, self.cloud = name, cloud
        self.told: list[Notice] = []
        self.task = asyncio.create_task(watch(name, cloud.url, self.tell, pauses=quickly))

    def tell(self, within_s: float, reason: str) -> None:
        self.told.append(Notice(within_s, reason))


def quickly(*_: float) -> Iterator[float]:
    while True:
        yield 0.01


@pytest.fixture
async def clouds(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[str], Any]]:
    """Starts a cloud that is watched: `await clouds("aws")`."""
    for probe in (SpotProbe, PreemptionProbe, ScheduledEventsProbe):
        monkeypatch.setattr(probe, "pause_s", 0.01)
    async with AsyncExitStack() as stack:

        async def start(name: str, *, watched: bool = True) -> Any:
            cloud = CLOUDS[name]()
            await cloud.start()
            stack.push_async_callback(cloud.stop)
            if not watched:
                return cloud
            made = Watched(name, cloud)
            stack.push_async_callback(stop, made.task)
            return made

        yield start


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("name", CLOUDS)
async def test_without_a_notice_nobody_is_told(clouds: Any, name: str) -> None:
    watched = await clouds(name)
    if name == "gcp":
        await wait_until(lambda: watched.cloud.hanging)
    else:
        await wait_until(lambda: watched.cloud.answered > 5)
    assert watched.told == []


@pytest.mark.parametrize(("name", "within_s"), [("aws", 120.0), ("gcp", 30.0), ("azure", 30.0)])
async def test_a_notice_is_told_once_with_its_time_by_the_clouds_clock(clouds: Any, name: str, within_s: float) -> None:
    watched = await clouds(name)
    await wait_until(lambda: watched.cloud.answered)
    watched.cloud.preempt(within_s)
    await wait_until(lambda: watched.told)
    asked = watched.cloud.asked
    if name != "gcp":  # whose question hangs until there is more news
        await wait_until(lambda: watched.cloud.asked > asked + 5)
    (notice,) = watched.told
    assert within_s - 7.0 <= notice.within_s <= within_s - 4.0
    assert notice.reason.startswith(f"{name}: ")


@pytest.mark.parametrize(("name", "standard_s"), [("aws", 120.0), ("azure", 30.0)])
async def test_where_the_server_tells_no_time_it_is_the_clouds_standard_notice(
    clouds: Any, name: str, standard_s: float
) -> None:
    watched = await clouds(name)
    watched.cloud.dated = False
    watched.cloud.preempt(7.0)
    await wait_until(lambda: watched.told)
    assert watched.told[0].within_s == standard_s - 5.0


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_machine_that_should_be_gone_already_is_left_at_once(clouds: Any, name: str) -> None:
    watched = await clouds(name)
    if name == "gcp":  # says no time
        watched.cloud.preempt(0.0)
        await wait_until(lambda: watched.told)
    else:
        watched.cloud.preempt(-100.0)
        await wait_until(lambda: watched.told)
        assert watched.told[0].within_s == 2.0


async def error_500(_: web.Request) -> web.Response:
    return web.Response(status=500, text="oops")


async def error_404(_: web.Request) -> web.Response:
    return web.Response(status=404)


async def nonsense(_: web.Request) -> web.Response:
    return web.Response(body=b"\xff\xfe{]" * 100)


async def null(_: web.Request) -> web.Response:
    return web.json_response(None)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b"x" * 65536)
    return response


async def redirect(request: web.Request) -> web.Response:
    raise web.HTTPFound(str(request.url.with_path("/elsewhere")))


async def cut(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def hang(_: web.Request) -> web.Response:
    await asyncio.sleep(1.0)
    return web.Response(status=500)


TROUBLES = [error_500, error_404, nonsense, null, endless, redirect, cut, hang]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("name", CLOUDS)
async def test_what_a_server_answers_instead_is_outlived(
    clouds: Any, name: str, trouble: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.rollout_worker.notices.ANSWER_S", 0.05 if trouble is hang else 3.0)
    watched = await clouds(name)
    await wait_until(lambda: watched.cloud.answered)
    watched.cloud.trouble = trouble
    asked = watched.cloud.asked
    watched.cloud.answer_all()
    patient = trouble is hang and name == "azure"  # its answers may take their time
    await wait_until(lambda: watched.cloud.asked > asked + (0 if patient else 4))
    assert watched.told == []
    assert not watched.task.done()
    watched.cloud.trouble = None
    watched.cloud.preempt(100.0)
    await wait_until(lambda: watched.told)


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_server_that_is_away_is_logged_once_and_asked_again(
    clouds: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = 0

    def counted(*_: float) -> Iterator[float]:
        nonlocal waits
        while True:
            waits += 1
            yield 0.001

    told: list[tuple[float, str]] = []
    work = watch(name, "http://127.0.0.1:9", lambda *notice: told.append(notice), pauses=counted)  # type: ignore[arg-type]
    task = asyncio.create_task(work)
    await wait_until(lambda: waits > 5)
    await stop(task)
    assert told == []
    assert capsys.readouterr().out.count("no notices to be had") == 1


async def test_no_question_goes_by_way_of_a_proxy(clouds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    watched = await clouds("aws")
    await wait_until(lambda: watched.cloud.answered)


async def test_a_metadata_address_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="metadata_url"):
        await watch("aws", "169.254.169.254", lambda *_: None)


async def test_aws_tokens_are_renewed_when_they_are_forgotten(clouds: Any) -> None:
    watched = await clouds("aws")
    for given in (1, 2, 3):
        await wait_until(lambda: watched.cloud.given == given)  # noqa: B023
        answered = watched.cloud.answered
        await wait_until(lambda: watched.cloud.answered > answered + 5)  # noqa: B023
        assert watched.cloud.given == given, "one token serves many questions"
        watched.cloud.forget()
    watched.cloud.preempt(60.0)
    await wait_until(lambda: watched.told)


async def test_aws_tokens_are_renewed_before_they_expire(clouds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.rollout_worker.notices._AWS_TOKEN_TTL_S", 1)
    watched = await clouds("aws")
    await wait_until(lambda: watched.cloud.given >= 3)
    assert watched.task.done() is False


async def test_gcp_is_told_of_a_change_while_the_question_hangs(clouds: Any) -> None:
    watched = await clouds("gcp")
    await wait_until(lambda: watched.cloud.hanging)
    asked = watched.cloud.asked
    watched.cloud.preempt(30.0)
    await wait_until(lambda: watched.told)
    assert watched.told == [Notice(25.0, "gcp: preempted")]
    assert watched.cloud.asked <= asked + 1


async def test_azure_may_take_its_time_for_the_first_answer(clouds: Any) -> None:
    cloud = await clouds("azure", watched=False)
    cloud.delay.clear()
    watched = Watched("azure", cloud)
    await wait_until(lambda: cloud.asked)
    cloud.preempt(30.0)
    cloud.delay.set()
    await wait_until(lambda: watched.told)
    assert cloud.asked <= 3, "one patient question, and one for the machine's name"
    await stop(watched.task)


@pytest.mark.parametrize(
    ("kind", "changes", "leaves"),
    [
        ("Preempt", {}, True),
        ("Terminate", {}, True),
        ("Reboot", {}, True),
        ("Redeploy", {}, True),
        ("Freeze", {"DurationInSeconds": 30}, True),
        ("Freeze", {"DurationInSeconds": 9}, False),
        ("Freeze", {}, False),
        ("Preempt", {"Resources": ["another_1"]}, False),
        ("Preempt", {"Resources": ["another_1", "ME_0"]}, True),
        ("SomethingNew", {}, False),
    ],
)
async def test_azure_events_count_where_they_take_this_machine_away(
    clouds: Any, kind: str, changes: dict[str, Any], leaves: bool
) -> None:
    watched = await clouds("azure")
    watched.cloud.schedule(kind, 60.0, **changes)
    answered = watched.cloud.answered
    await wait_until(lambda: watched.cloud.answered > answered + 4)
    assert bool(watched.told) is leaves
    assert watched.cloud.acknowledged == 0


async def test_azure_events_that_have_begun_leave_little_time(clouds: Any) -> None:
    watched = await clouds("azure")
    watched.cloud.schedule("Preempt", None)
    await wait_until(lambda: watched.told)
    assert watched.told[0].within_s == 2.0


async def test_azure_events_are_taken_for_ours_where_our_name_is_not_told(clouds: Any) -> None:
    watched = await clouds("azure")
    watched.cloud.name = ""
    watched.cloud.schedule("Preempt", 60.0, Resources=["somebody_7"])
    await wait_until(lambda: watched.told)


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_workers_rollouts_are_handed_over_when_its_machine_is_taken(
    house: House, expected: Expected, clouds: Any, name: str
) -> None:
    cloud: Any = await clouds(name, watched=False)
    worker = await house.worker(notices=name, metadata_url=cloud.url)
    for number in range(8):
        house.coordinator.assign(f"r{number}", Sampling(max_tokens=4000))
    await wait_until(lambda: all(house.coordinator.length(f"r{number}") > 20 for number in range(8)))
    cloud.preempt(60.0)
    notice = await house.coordinator.hear("draining")
    assert notice.reason.startswith(f"{name}: ")
    assert 20.0 < notice.deadline_s < 56.0
    await worker.task
    assert house.coordinator.released() == {f"r{number}": "drained" for number in range(8)}
    for record in read_ledger(house.counter_file):
        assert house.coordinator.ids(record.rollout_id) == expected(record.generated)


async def test_a_metadata_server_in_trouble_never_ends_the_worker(house: House, clouds: Any) -> None:
    cloud: Cloud = await clouds("aws", watched=False)
    cloud.trouble = nonsense
    await house.worker(notices="aws", metadata_url=cloud.url)
    house.coordinator.assign("r1", Sampling(max_tokens=100))
    await wait_until(lambda: "r1" in house.coordinator.finished and cloud.asked > 1)
    assert "draining" not in house.coordinator.heard
