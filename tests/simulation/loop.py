"""An event loop whose clock is virtual and whose processes can be killed, stopped and slowed.

Invariant: every handle and timer belongs to the process whose code scheduled it (a context variable that tasks
inherit). A handle runs only while its process is alive and not stopped; time passes only when no process has anything
to run. Which process runs next is drawn from the seed; within one process handles run in their order. So one seed is
one history.

A killed process leaves its handles behind unrun: nothing of it is told, no `finally` is executed, as after a SIGKILL.
All tasks are kept until the run is over, so that no garbage collector closes one in the middle of it.
"""

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

#: Handles that may run at one instant before the processes are taken to chase each other in circles.
_LIVELOCK: Final = 200_000
#: What code that the loop hands to a thread takes, in seconds.
_THREAD_S: Final = 0.002


class Proc:
    """One process, from its start to its kill. `cost`: least and most seconds that each handle takes, if it is slow."""

    def __init__(self, name: str, loop: "SimLoop") -> None:
        self.name = name
        self.alive, self.stopped = True, False
        self.clock = 0.0  # by how much its wall clock is off
        self.cost: tuple[float, float] | None = None
        self.struck = False  # something was done to it
        self.former: Proc | None = None  # the process that had this name before it, which may be alive
        self.woken = 0.0  # when it last went on after a stop
        self.busy = self.able = False
        self.ready: deque[asyncio.Handle] = deque()
        self.signals: dict[int, Callable[[], object]] = {}
        self.context = contextvars.copy_context()
        self.context.run(current.set, self)
        self._loop = loop

    def __repr__(self) -> str:
        return self.name

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        """Run `work` as a task of this process."""
        return self._loop.create_task(work, name=name, context=self.context.copy())

    def after(self, delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Run `callback` in this process: what the outside does to it, a packet or a signal."""
        return self._loop.call_at(self._loop.now + delay, callback, *args, context=self.context)

    def kill(self) -> None:
        self.alive = False
        self.ready.clear()

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped, self.woken = False, self._loop.now
        self._loop.enable(self)

    def rest(self) -> None:
        """A slow process has run one handle, and takes its time for it."""
        assert self.cost is not None
        self.busy = True
        when = self._loop.now + self._loop.random.uniform(*self.cost)
        self._loop.call_at(when, self._rested, context=self._loop.outside.context)

    def _rested(self) -> None:
        self.busy = False
        self._loop.enable(self)


current: contextvars.ContextVar[Proc] = contextvars.ContextVar("process")


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set does not hang on its address, so that a seed is the same anywhere."""

    numbers = itertools.count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(SimTask.numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class Exited(BaseException):
    """Raised where a process ends itself at once: nothing behind that point runs."""


class Stuck(Exception):
    """Nothing can ever happen any more, or too much happens at one instant."""


class Handle(asyncio.Handle):
    """asyncio's, made with less ado."""

    __slots__ = ()

    def __init__(  # it takes the place of what asyncio's does for a loop that may be debugged
        self, callback: Any, args: Any, loop: Any, context: contextvars.Context | None
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None


class SimLoop(asyncio.BaseEventLoop):
    """`outside` is the process of whoever watches and breaks the others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.tasks: list[asyncio.Task[Any]] = []
        self.errors: list[str] = []
        self.connect: Callable[..., Coroutine[Any, Any, Any]] | None = None
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._able: list[Proc] = []
        self._over = False
        self.outside = Proc("outside", self)
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_error)
        SimTask.numbers = itertools.count(1)

    def _make_task(self, _loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        task = SimTask(work, loop=self, **options)
        self.tasks.append(task)
        return task

    def _note_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._over and not isinstance(context.get("exception"), Exited):
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    # -- handles and timers --------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = Handle(callback, args, self, context)
        proc = handle._context.get(current, self.outside)
        if proc.alive and not self._over:
            proc.ready.append(handle)
            if not proc.able:
                self.enable(proc)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are passed over when they come up."""

    def enable(self, proc: Proc) -> None:
        """Let a process run that may have become able to."""
        if proc.ready and proc.alive and not (proc.able or proc.stopped or proc.busy):
            proc.able = True
            self._able.append(proc)

    # -- running -------------------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        began = self.steps
        while not self._stopping:  # type: ignore[attr-defined]
            able = self._able
            if not able:
                self._advance()
                began = self.steps
                continue
            at = int(self.random.random() * len(able)) if len(able) > 1 else 0
            proc, able[at] = able[at], able[-1]
            able.pop()
            proc.able = False
            self._run_proc(proc)
            if self.steps - began > _LIVELOCK:
                raise Stuck(f"{_LIVELOCK} handles at {self.now:.3f} s, the last of {proc}")

    def _run_proc(self, proc: Proc) -> None:
        """Run what the process has to run now; a slow one gets one handle done."""
        ready = proc.ready
        while ready and not proc.stopped:
            handle = ready.popleft()
            if handle._cancelled:
                continue
            self.steps += 1
            handle._run()
            if proc.cost is not None:
                proc.rest()
                return
            if self._stopping:  # type: ignore[attr-defined]
                self.enable(proc)
                return

    def _advance(self) -> None:
        """Go to the next instant at which a timer is due."""
        timers = self._timers
        while timers:
            when, _, timer = heapq.heappop(timers)
            if timer._cancelled:
                continue
            self.now = max(self.now, when)
            proc = timer._context.get(current, self.outside)  # type: ignore[attr-defined]
            if proc.alive:
                proc.ready.append(timer)
                if not proc.able:
                    self.enable(proc)
            if not timers or timers[0][0] > when:
                return
        raise Stuck(f"nothing is left to happen at {self.now:.3f} s")

    # -- what the world outside offers ---------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]
        self, _executor: Any, function: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """In this thread, a moment later."""
        done: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(function(*args))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
                done.set_exception(error)

        self.call_later(self.random.uniform(0.0, _THREAD_S), work)
        return done

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        current.get().signals[sig] = lambda: callback(*args)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str = "", port: int = 0, **_options: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        assert self.connect is not None
        made: tuple[asyncio.Transport, asyncio.Protocol] = await self.connect(protocol_factory, host, port)
        return made

    def unretrieved(self) -> list[str]:
        """Errors that ended a task and that nobody ever looked at."""
        return [
            f"task {task.get_name()}: {task.exception()!r}"
            for task in self.tasks
            if task.done() and not task.cancelled() and task._log_traceback
            if not isinstance(task.exception(), Exited)
        ]

    def bury(self) -> None:
        """The run is over: whatever is let go from here on has no effect."""
        self._over = True
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for proc in self._able:
            proc.ready.clear()
        self.tasks.clear()
        self._timers.clear()
        self._able.clear()
