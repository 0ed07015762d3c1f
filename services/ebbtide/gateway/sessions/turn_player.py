"""Plays the turns of sessions: each is matched to what was sampled before, and stored before it is submitted.

Invariant: of the sessions that were played lately, one in use stays in memory; of the others the one that was used
longest ago goes first. A session that went is read again from the coordinator by its next turn.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Final

from msgspec.structs import replace

from ebbtide.client.lease import GatewayLease
from ebbtide.errors import AlreadyExists, Internal, InvalidRequest, NoCapacity, NotFound, NotReady
from ebbtide.gateway.access import SessionLimits
from ebbtide.gateway.decode import ChoiceDelta, ChoiceResult, ChoiceText
from ebbtide.gateway.request import ChatPrompt, IdsPrompt, TextRequest, request_digest, session_episode, session_group
from ebbtide.gateway.request_player import PlayedRequest, RequestPlayer
from ebbtide.gateway.sessions.live import LiveSession, LongReaders, completion_of
from ebbtide.gateway.sessions.turns import SessionNames, names_of
from ebbtide.types.ids import new_fence
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import check_learnable
from ebbtide.types.session import MeteredKey, Session, SessionState, SessionTurn

#: Books to keep, as an empty one takes memory, too.
_MOST: Final = 8192
#: A turn waits so long for completions of the session that its client left, or that another gateway answers.
_PATIENCE_S: Final = 5.0


class SessionPlayer:
    """Plays the sessions of one key on one run."""

    def __init__(
        self, cache: "SessionCache", lease: GatewayLease, player: RequestPlayer, limits: SessionLimits, owner: str
    ) -> None:
        self.lease, self._cache, self._player, self._limits, self._owner = lease, cache, player, limits, owner

    async def prepare(self, request: TextRequest, key: MeteredKey | None = None) -> "PlayedTurn":
        """Store the turn of a session's request. Opens the session if it is new. `key`: the client's, if it has limits.

        Its caller submits it outside of the session's lock: a submit may wait, and the session's other requests do not.
        A repeat of a request's id plays the stored turn. Raises what `RequestPlayer.prepare` raises, `InvalidRequest`
        naming a field of sampling on which the run's learner could not train, `AlreadyExists` if the session has ended,
        `NoCapacity` for too many sessions, and `RateLimited` or `BudgetSpent`.
        """
        _check_prompts(request)
        if self.lease.run.spec.from_agents and self.lease.run.spec.built_in:
            check_learnable(request.sampling)
        await self._player.check(request, self._owner)
        asked = replace(request, request_id=request.request_id or new_fence())
        async with self.opened(request.session_id, request.group_id) as live:
            made, prompt = await self._turn(live, asked, key)
            return PlayedTurn(live, asked.without_prompts(), *made, prompt)

    @asynccontextmanager
    async def opened(self, name: str, group: str = "") -> AsyncIterator[LiveSession]:
        """A session under its lock, with all turns. It is opened if it is new; raises `AlreadyExists` if it ended."""
        with self._cache.used(self.lease, self._player, self.stored_id(name), self._owner) as live:
            async with live.lock:
                try:
                    session = await live.catch_up(_PATIENCE_S)
                except NotFound:
                    live.session = session = await self._open(live, name, group)
                if session.state is not SessionState.OPEN:
                    raise session_ended(name)
                if group and group != names_of(session).group:
                    text = "the session is of another group; leave it out, or begin another session"
                    raise InvalidRequest(text, field="X-Group-ID")
                yield live

    @asynccontextmanager
    async def found(self, name: str) -> AsyncIterator[tuple[LiveSession, Session]]:
        """A session under its lock, as far as it is known. Raises `NotFound` for one that is not this key's."""
        with self._cache.used(self.lease, self._player, self.stored_id(name), self._owner) as live:
            async with live.lock:
                try:
                    session = await live.catch_up(_PATIENCE_S)
                except NotFound:
                    raise NotFound(f"no session {name[:100]!r} of this key is here") from None
                yield live, session

    def stored_id(self, name: str) -> str:
        """The coordinator's id of a session."""
        return session_episode(self.lease.run.run_id, self._owner, name)

    async def _open(self, live: LiveSession, name: str, group: str) -> Session:
        if live.book.last:  # it was here: its end was forgotten meanwhile
            live.session = None
            raise session_ended(name)
        await self._cache.count(self.lease, self._owner, self._limits.per_key)
        names = SessionNames(session=name, group=group)
        group_id = session_group(self.lease.run.run_id, self._owner, group) if group else ""
        try:
            return await self.lease.open_session(live.session_id, self._owner, group_id=group_id, record=names.packed())
        except NotReady:
            raise session_ended(name) from None

    async def _turn(
        self, live: LiveSession, request: TextRequest, key: MeteredKey | None
    ) -> tuple[tuple[list[RolloutRequest], list[ChoiceText]], list[int]]:
        """The completions and the prompt of a request's turn, which is added unless it is here."""
        name, made = self._player.request_name(request, self._owner), None
        if live.book.turn_of(name) is None:
            made, planned = await self._add(live, name, request, key)
        turn = live.book.turn_of(name)
        if turn is None:
            raise Internal("the coordinator stored a turn, and did not tell of it")
        if live.settings_of(turn.number).request != request_digest(request):
            raise AlreadyExists("X-Request-ID: another request of the session has this id; choose another one")
        prompt = live.book.prompt_ids(turn.number)
        if made is None or prompt != planned:  # a repeat, of which another gateway planned the prompt
            made = await self._player.completions(request, self._owner, [prompt])
        return made, prompt

    async def _add(
        self, live: LiveSession, name: str, request: TextRequest, key: MeteredKey | None
    ) -> tuple[tuple[list[RolloutRequest], list[ChoiceText]], list[int]]:
        """Add a turn. Returns its completions, and the prompt that was planned for it."""
        self._check_room(live)
        prompt = request.prompts[0]
        field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        if isinstance(prompt, IdsPrompt):
            self._player.check_ids(prompt.ids, field)
        planned = await live.plan(request)
        self._player.check_ids(planned.prompt_ids, field)
        # What is refused is refused before the turn is stored. Only of a key's turns that come at once, a submit may
        # find no room that was there: then a repeat of the request is submitted once there is.
        made = await self._player.completions(request, self._owner, [planned.prompt_ids])
        rollouts = made[0]
        ids = tuple(rollout.rollout_id for rollout in rollouts)
        turn = SessionTurn(request_id=name, rollout_ids=ids, record=planned.record.packed())
        try:
            await live.add(turn, key, len(planned.prompt_ids) + sum(one.sampling.max_tokens for one in rollouts))
        except (NotReady, NotFound):
            await self._tell_ended(live, request.session_id)
            raise
        return made, planned.prompt_ids

    async def _tell_ended(self, live: LiveSession, name: str) -> None:
        """Raise `AlreadyExists` if a turn was refused because the session has ended."""
        try:
            page = await live.lease.read_turns(live.session_id, self._owner, live.book.last)
        except NotFound:
            live.session = None
            raise session_ended(name) from None
        live.session = page.session
        if page.session.state is not SessionState.OPEN:
            raise session_ended(name)

    def _check_room(self, live: LiveSession) -> None:
        if live.book.last >= self._limits.turns:
            text = f"has {live.book.last} turns, the most that a session may have; end it, and begin another one"
            raise InvalidRequest(text, field="X-Session-ID")
        if live.bytes >= self._limits.session_bytes:
            most = self._limits.session_bytes
            text = f"takes more than {most} bytes, the most that a session may take; end it, and begin another one"
            raise InvalidRequest(text, field="X-Session-ID")


def _check_prompts(request: TextRequest) -> None:
    if len(request.prompts) > 1:
        raise InvalidRequest("a request of a session has one prompt; ask once for each", field="prompt")
    prompt = request.prompts[0] if request.prompts else None
    if isinstance(prompt, ChatPrompt) and not prompt.generate:
        raise InvalidRequest("must be true in a session", field="add_generation_prompt")
    if isinstance(prompt, ChatPrompt) and prompt.special:
        raise InvalidRequest("must be false in a session: the template writes them", field="add_special_tokens")


class PlayedTurn(PlayedRequest):
    """One turn."""

    def __init__(
        self,
        live: LiveSession,
        request: TextRequest,
        rollouts: Sequence[RolloutRequest],
        choices: Sequence[ChoiceText],
        prompt: list[int],
    ) -> None:
        player = live.player
        super().__init__(player.lease, player.threads, request, rollouts, choices, [prompt], live.owner)
        self._live = live

    async def submit(self, key: MeteredKey | None = None) -> None:
        """Raises `AlreadyExists` if the session has ended since the turn was stored."""
        session = self._live.session
        if session is None or session.state is not SessionState.OPEN:
            raise session_ended(self._request.session_id)
        await super().submit(key)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        ids = [rollout.rollout_id for rollout in self._rollouts]
        results = [ChoiceResult(number) for number in range(len(ids))]
        with self._live.answering(ids):
            async with aclosing(super().deltas()) as deltas:
                async for delta in deltas:
                    results[delta.index].add(delta)
                    if delta.finish is not None:  # before the client has it: its next turn repeats it
                        self._live.take(completion_of(ids[delta.index], results[delta.index]))
                    yield delta


class SessionCache:
    """The sessions of all runs that this gateway serves."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes, self._long_readers = kept_bytes, LongReaders()
        self._live: OrderedDict[tuple[str, str], LiveSession] = OrderedDict()
        #: Opened through this gateway since the owner's sessions were counted.
        self._counted: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._live)

    @contextmanager
    def used(self, lease: GatewayLease, player: RequestPlayer, session_id: str, owner: str) -> Iterator[LiveSession]:
        """A session that stays while the block runs. It may be new here."""
        key = (lease.run.run_id, session_id)
        live = self._live.get(key)
        if live is None:
            live = self._live[key] = LiveSession(session_id, owner, lease, player, self._long_readers)
        live.lease, live.player = lease, player  # the run's lease may be another one by now
        self._live.move_to_end(key)
        live.users += 1
        try:
            yield live
        finally:
            live.users -= 1
            if live.session is None or live.session.state is not SessionState.OPEN:
                self._forget(key, live)
            self._shrink()

    async def count(self, lease: GatewayLease, owner: str, most: int) -> None:
        """Count a session that is about to be opened. Raises `NoCapacity` if the owner has `most` open ones."""
        key = (lease.run.run_id, owner)
        if key not in self._counted or self._counted[key] >= most:
            sessions = await lease.sessions(owner)
            self._counted[key] = sum(one.state is SessionState.OPEN for one in sessions)
        if self._counted[key] >= most:
            raise NoCapacity(f"{owner} has {most} open sessions, the most that one key may have; end some")
        self._counted[key] += 1

    def close(self) -> None:
        for live in self._live.values():
            live.close()
        self._live.clear()

    def _shrink(self) -> None:
        size = sum(live.bytes for live in self._live.values()) if len(self._live) > 1 else 0
        for key, live in list(self._live.items()):
            if size <= self._kept_bytes and len(self._live) <= _MOST:
                return
            if not live.users:
                self._forget(key, live)
                size -= live.bytes

    def _forget(self, key: tuple[str, str], live: LiveSession) -> None:
        if not live.users and self._live.get(key) is live:
            del self._live[key]
            live.close()


def session_ended(name: str) -> AlreadyExists:
    """The error of a request that comes after its session's end."""
    return AlreadyExists(f"X-Session-ID: session {name[:100]!r} has ended; begin another one, under another id")
