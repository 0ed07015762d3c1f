"""Names every key in Redis, with its type, the scripts that write it, and its end; and loads the scripts of `lua/`.

All keys of a run have the run id as hash tag. Scripts get the prefix of the run (or the fleet) as their only key, and
the names below as Lua constants, so keys are named here alone. Only a coordinator writes, and, except SYNCED, only
through scripts that check its term: the run's, or the fleet's if the run has none yet. "The run's end" is FinishRun or
CancelRun.

A store evaluates a script from its first line at each call. So each script comes after those constants and parts of
`lib.lua` alone that it uses: a part that is not used would cost each call its share.
"""

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from ebbtide.types.fleet import EndCause

#: Prefix of the fleet's keys.
FLEET: Final = "ebbtide:{fleet}:"
#: string: the term of the coordinator that may write. A coordinator sets it when it begins to lead; never ends.
TERM: Final = FLEET + "term"
#: string: the schema of all stored data; see `Schema`. A coordinator sets it when it starts; never ends.
SCHEMA: Final = FLEET + "schema"
#: The schema that this program writes: that of the last migration.
NEWEST_SCHEMA: Final = 1
#: string with an expiry: term and address of the leading coordinator, separated by a space. Owner: lead.
LEADER: Final = FLEET + "leader"
#: string: the store's incarnation in which all runs were last settled; see `RunTopic.settle`. Never ends.
LIFE: Final = FLEET + "life"
#: string: 32 bytes from which all runs' publisher keys are derived. The first coordinator makes it; never changes or
#: ends.
PUBLISHERS: Final = FLEET + "publishers"
#: string that nobody reads: a coordinator writes it, also while it stands by, to learn what the server has synced; see
#: `DurabilityWatch`. Never ends.
SYNCED: Final = FLEET + "synced"
#: zset: run id -> order of submission. A run enters with its record, and leaves after that has expired.
INDEX: Final = FLEET + "runs"

#: Name -> suffix after the run's prefix.
RUN_KEYS: Final[dict[str, str]] = {
    # hash: spec, status, message, created and ended (ms, the store's clock), seq (next place in the queue), version
    # (last one reserved), events (last number used), newest, newest_record, sessions (last number given), kept (entries
    # of spans and of ids that are over), first_step (lower steps are over), facts and chatter (bytes of events),
    # submitter (a name). Owner: submit_run, submit, lease_claim, announce_version, lib, end_run.
    # Expires some days after the run's end.
    "RUN": "run",
    # hash: counter or `dropped:REASON` -> integer. The script of a transition changes its counters. Expires with RUN.
    "COUNT": "count",
    # stream: k(ind), key, m(essage), v(alues) and l(abels) as JSON, at (ms since submission); of the facts in lib.lua.
    # Expires with RUN, or goes when ended runs take too much.
    "EVENTS": "events",
    # stream like EVENTS, of all other events. Capped. Expires with RUN, or goes when ended runs take too much.
    "CHATTER": "chatter",
    # set: `kind:key` of events, to drop repeats. A key leaves with its event. Deleted at the run's end.
    "EVENT_KEYS": "eventkeys",
    # stream: r(ollout), a(ttempt), w(orker), f(irst) and l(ast) token, b(egin) and e(nd) in ms since submission, why,
    # v(ersions of its first and last token, u32 each), c(ause, a number of `EndCause`): an entry per
    # attempt that has ended. Capped. Owner: lib. Expires with RUN, or goes when ended runs take too much.
    "SPANS": "spans",
    # stream like SPANS, of requests: so many of them do not push out what the run's steps did.
    "REQUEST_SPANS": "requestspans",
    # hash: term, `lease:ROLE` -> fence (of a gateway, the role is `gateway/HOLDER`), `settled:ROLE` -> "FENCE NUMBER"
    # (submits under that lease with a lower number are settled), `claims:ROLE` -> claims so far, and
    # `r:ROLLOUT` -> attempt for each running rollout: what every write compares. Owner:
    # claim_term, lease_*, submit, place, append, requeue. Deleted at the run's end, which bars all further writes.
    "FENCE": "fence",
    # string per role, with an expiry: the role's holder; gone unless the lease is renewed in time.
    "CLAIM": "claim:",
    # zset: holder of a gateway's lease -> when it was last renewed (ms since submission). Silent ones go with their
    # fences. Owner: lease_*. Deleted at the run's end.
    "GATEWAYS": "gateways",
    # zset per role: number -> the same, of submits that were taken and are not settled. Owner: submit. Deleted at the
    # run's end.
    "SUBMITS": "submits:",
    # hash: announced version -> msgpack of its PolicyVersion. Deleted at the run's end.
    "VERSIONS": "versions",
    # zset: rollout -> place in the queue, of queued and running ones. A member leaves when it finishes, is cancelled
    # or completed.
    "OPEN": "open",
    # hash per rollout: req (msgpack, without the prompt), prompt, digest, asked (a digest of its client's request, if
    # the gateway gave one), kind, state, attempt, attempts, worker,
    # from, begin (ms since submission), account (of a key with limits), prompt_charge and held (tokens), rate (tokens a
    # minute that pay off its debt) and charged (ms since submission), all while it is open; scores (bytes that the
    # scores of its prompt take, reserved until it finishes; absent if it is not scored), barren, evidence, avoid
    # (workers, a comma after each), reason, message, cursor, step (if it has one). Owner: submit .. complete.
    # Deleted when acknowledged, completed, cancelled, or at the run's end.
    "ROLLOUT": "rollout:",
    # zset: finished rollout of the kind request -> when it finished (ms since submission), `inf` while a session keeps
    # it, `-inf` if it is to be deleted at once. A member leaves with ROLLOUT. Owner: lib, add_turn, expire.
    "REQUESTS": "requests",
    # zset: session -> its number in the order of opening, until it is forgotten. Owner: open_session, expire.
    "SESSIONS": "sessions",
    # zset per owner: the same of its sessions alone. Owner: open_session, expire.
    "OWNED": "owned:",
    # zset: open session -> when it was last used (ms since submission). Owner: open_session, add_turn, lib.
    "IDLE": "idle",
    # zset: ended session -> when it ended (ms since submission). Owner: lib, expire.
    "OVER": "over",
    # zset: `r:ROLLOUT` of deleted requests and `s:SESSION` of forgotten sessions -> since when (ms since submission),
    # to recognise late repeats for a while. Owner: lib, expire.
    "GONE": "gone",
    # hash per session: owner, group, record, state ("open", "verifying", "completed", "dropped"), reason, opened (ms
    # since submission), turns (their number), held (bytes that it counts for), verifier and its data, unverified (its
    # entry there), reward (that the verifier gave). Ends some minutes after the session. Owner: open_session, add_turn,
    # end_session, verdict, lib.
    "SESSION": "session:",
    # list per session: "MS RECORD" of its turns, in order: ms since submission, and the packed turn. Ends with the
    # session. Owner: add_turn.
    "TURNS": "turns:",
    # hash per session: request -> number of its turn. Ends with the session. Owner: add_turn.
    "TURN_IDS": "turnids:",
    # list per session: its rollouts. Ends with the session. Owner: add_turn.
    "KEPT": "kept:",
    # hash per session: episode -> "ROLLOUTS TRAJECTORY" of a branch that came before its end: how many rollouts it
    # counts for, and the packed trajectory. Ends with the session. Owner: end_session.
    "BRANCHES": "branches:",
    # stream: id -> session that waits for the verdict of its verifier. An entry leaves with the verdict, or with the
    # session. Owner: end_session, lib. Deleted at the run's end.
    "UNVERIFIED": "unverified",
    # hash: rollout -> the open session that keeps it. Owner: add_turn, lib.
    "KEPT_BY": "keptby",
    # hash: `OWNER:NAME` -> number, of the keys with limits: requests, open (requests), spent, reserved (tokens), day
    # (since the Unix epoch), today (tokens of it), request_debt, token_debt (thousandths), at (ms since submission, of
    # the debts), and `OWNER:g:GROUP` -> open rollouts of a request; `owners`: how many. Owner: submit, lib. Expires
    # with RUN.
    "ACCOUNTS": "accounts",
    # string per rollout: its token records so far. Owner: append. Ends with ROLLOUT.
    "TOKENS": "tokens:",
    # stream: id -> finished rollout that is neither acknowledged nor completed. An entry ends with ROLLOUT.
    "FINISHED": "finished",
    # set: `r:ROLLOUT` and `e:EPISODE` that are over, to recognise late repeats: the newest ones, and those of the steps
    # from `first_step` on. Deleted at the run's end.
    "DONE": "done",
    # list: "STEP SECONDS MEMBER" of DONE, oldest first: its step, if it has one, and when it was over, since the run's
    # submission. Deleted at the run's end.
    "DONE_ORDER": "doneorder",
    # stream: n (its training rollouts), data (msgpack of the Trajectory), at (ms). Deleted when committed.
    "TRAJECTORIES": "trajectories",
}


def run_prefix(run_id: str) -> str:
    """The prefix of all the run's keys."""
    return f"ebbtide:{{{run_id}}}:"


def run_key(run_id: str, name: str, member: str = "") -> str:
    """The run's key `name` of `RUN_KEYS`; `member` for keys per rollout or role."""
    return run_prefix(run_id) + RUN_KEYS[name] + member


#: The fleet's keys that scripts use.
FLEET_KEYS: Final = {"TERM": TERM, "SCHEMA": SCHEMA, "LEADER": LEADER, "INDEX": INDEX, "LIFE": LIFE}


def lua_constants() -> str:
    """Lua that names the fleet's keys, those of the run whose prefix is `KEYS[1]`, and the causes of ends."""
    fleet = "".join(f"local {name} = '{key}'\n" for name, key in FLEET_KEYS.items())
    fleet += f"local NEWEST_SCHEMA = '{NEWEST_SCHEMA}'\n"
    fleet += f"local CAUSE = {{{', '.join(f'{cause.name} = {cause}' for cause in EndCause)}}}\n"
    return fleet + "".join(f"local {name} = KEYS[1] .. '{suffix}'\n" for name, suffix in RUN_KEYS.items())


_COMMENT: Final = re.compile(r"--.*")
_WORD: Final = re.compile(r"\w+")
#: A part begins with a local at the beginning of a line, and declares the names behind it.
_DECLARATION: Final = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)


class LuaScript:
    """One script's text, and the digest by which a store runs a script that it knows."""

    def __init__(self, name: str, text: str) -> None:
        self.name: Final = name
        self.text: Final = text.encode()
        self.sha: Final = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


class _Part(NamedTuple):
    names: frozenset[str]  # that it declares
    words: frozenset[str]  # in it: what it uses is among them
    text: str


@cache
def script(name: str) -> LuaScript:
    """The script `lua/NAME.lua`."""
    body = _read(name)
    return LuaScript(name, _used(_words(body)) + body)


def _used(words: frozenset[str]) -> str:
    """The parts that something with these words uses, in their order. Parts use only what stands before them."""
    used: list[_Part] = []
    for part in reversed(_parts()):
        if part.names & words:
            used.append(part)
            words |= part.words
    return "".join(part.text for part in reversed(used))


@cache
def _parts() -> list[_Part]:
    return list(_split(lua_constants() + _read("lib")))


def _split(text: str) -> Iterator[_Part]:
    found = list(_DECLARATION.finditer(text))
    ends = [one.start() for one in found[1:]] + [len(text)]
    for one, end in zip(found, ends, strict=True):
        part = text[one.start() : end]
        yield _Part(frozenset(one[1].split(", ")), _words(part), part)


def _words(text: str) -> frozenset[str]:
    """Names in a text, without its comments; words of its strings are among them, which does no harm."""
    return frozenset(_WORD.findall(_COMMENT.sub("", text)))


def _read(name: str) -> str:
    return (resources.files("ebbtide.store") / "lua" / f"{name}.lua").read_text("utf-8")
