"""Threads in which prompts are encoded: each key has its turns."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import httpx
import pytest

from ebbtide.errors import Unavailable
from ebbtide.gateway.http.route import AppState
from ebbtide.gateway.prompt_threads import PromptThreads
from tests.fakes.scripted_rollouts import MarkedOutputs, ScriptedSource
from tests.unit.gateway.http.conftest import HEADERS

CHAT: Final = {"messages": [{"role": "user", "content": "x"}]}


async def started(work: Sequence[asyncio.Task[Any]]) -> None:
    """Every task has asked for its turn."""
    assert work
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_key_with_many_prompts_delays_another_key_by_one() -> None:
    threads, goes_on, order = PromptThreads(1), threading.Event(), list[str]()

    def work(name: str) -> None:
        goes_on.wait(30)
        order.append(name)

    asked = [asyncio.create_task(threads.run("flood", lambda: work("flood"))) for _ in range(5)]
    asked.append(asyncio.create_task(threads.run("other", lambda: work("other"))))
    await started(asked)
    goes_on.set()
    await asyncio.gather(*asked)
    assert order.index("other") <= 2
    threads.close()


async def test_slow_prompts_leave_the_shared_threads_free() -> None:
    threads, goes_on = PromptThreads(2), threading.Event()
    asked = [asyncio.create_task(threads.run("a", lambda: goes_on.wait(30))) for _ in range(100)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert await asyncio.to_thread(lambda: "free") == "free"
    goes_on.set()
    assert all(await asyncio.gather(*asked))
    threads.close()


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("stop", [[], ["zzz"]])
async def test_parsers_are_made_once_and_parse_whole_texts_away_from_the_event_loop(
    http: httpx.AsyncClient, source: ScriptedSource, session: bool, stop: list[str]
) -> None:
    parsers = source.model.parsers
    assert isinstance(parsers, MarkedOutputs)
    headers = {"x-session-id": "episode"} if session else {}
    sent = {**CHAT, "max_tokens": 9, "n": 3, "stop": stop}
    assert (await http.post("/v1/chat/completions", json=sent, headers=headers)).status_code == 200
    assert len(parsers.made) == len(set(parsers.made)) == 3
    assert parsers.threads
    assert threading.main_thread() not in parsers.threads


async def test_those_that_leave_while_they_wait_take_no_turn() -> None:
    threads, goes_on = PromptThreads(1), threading.Event()
    ran = list[int]()
    first = asyncio.create_task(threads.run("a", lambda: goes_on.wait(30)))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(threads.run("a", partial(ran.append, number))) for number in range(3)]
    await started(waiting)
    waiting[0].cancel()
    goes_on.set()
    first.cancel()  # its work still has the thread until it ends
    await asyncio.gather(*waiting[1:])
    assert ran == [1, 2]
    threads.close()


async def test_beyond_the_queue_the_key_with_most_prompts_is_refused_and_others_are_served() -> None:
    threads, goes_on, order = PromptThreads(1, most_waiting=3), threading.Event(), list[str]()

    def work(name: str) -> None:
        goes_on.wait(30)
        order.append(name)

    async def encode(owner: str, name: str) -> None:
        await threads.run(owner, lambda: work(name))

    asked = [asyncio.create_task(encode("flood", f"flood-{number}")) for number in range(4)]  # one runs, three wait
    asked.append(asyncio.create_task(encode("other", "other")))
    await started(asked)
    asked.append(asyncio.create_task(encode("flood", "flood-4")))
    await started(asked)
    goes_on.set()
    ended = await asyncio.gather(*asked, return_exceptions=True)
    refused = [number for number, error in enumerate(ended) if isinstance(error, Unavailable)]
    assert refused == [3, 5], "the last ones of the key that floods"
    assert sorted(order) == ["flood-0", "flood-1", "flood-2", "other"]
    threads.close()


async def test_an_answers_work_is_never_refused_and_takes_no_prompts_place() -> None:
    threads, goes_on = PromptThreads(1, most_waiting=1), threading.Event()
    asked = [asyncio.create_task(threads.run("a", lambda: goes_on.wait(30)))]
    asked += [asyncio.create_task(threads.run("a", lambda: True, refusable=False)) for _ in range(3)]
    await started(asked)
    asked += [asyncio.create_task(threads.run("a", lambda: True)) for _ in range(2)]
    await started(asked)
    goes_on.set()
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(one, Unavailable) for one in ended] == [False, False, False, False, False, True]
    threads.close()


async def test_those_that_left_make_room_in_the_queue() -> None:
    threads, goes_on = PromptThreads(1, most_waiting=1), threading.Event()
    asked = [asyncio.create_task(threads.run("a", lambda: goes_on.wait(30))) for _ in range(2)]
    await started(asked)
    asked[1].cancel()
    await asyncio.gather(asked[1], return_exceptions=True)
    asked.append(asyncio.create_task(threads.run("a", lambda: True)))
    await started(asked)
    goes_on.set()
    assert await asked[2]
    threads.close()


async def test_a_client_whose_prompt_finds_no_room_is_told_when_to_come_back(
    state: AppState, http: httpx.AsyncClient
) -> None:
    full = PromptThreads(1, most_waiting=1)
    goes_on = threading.Event()
    busy = [asyncio.create_task(full.run("another", lambda: goes_on.wait(30))) for _ in range(2)]
    await started(busy)
    key = state.keys.admit({"authorization": HEADERS["authorization"]})
    (await state.directory.find(key, "")).player.threads = full
    first = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
    refused = await first
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    goes_on.set()
    await asyncio.gather(*busy)
    full.close()


async def test_what_work_raises_reaches_its_caller_and_frees_the_thread() -> None:
    threads = PromptThreads(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda: 1 // 0)
    threads.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/sessions/s/v1/chat/completions", "/tokenize"])
async def test_prompts_are_encoded_while_the_shared_threads_are_busy(http: httpx.AsyncClient, path: str) -> None:
    goes_on = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(goes_on.wait, 30))
    async with asyncio.timeout(20):
        assert (await http.post(path, json=CHAT)).status_code == 200
    assert not busy.done()
    goes_on.set()
    await busy
