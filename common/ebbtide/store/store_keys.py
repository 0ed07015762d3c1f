"""Every key in Redis: its type, who owns it, and when it ends.

All keys of a run carry the run id as hash tag. Scripts get the run's prefix (or the fleet's) as their only key and the
names below as Lua constants of the same names, so that this is the one place that names a key. Only a coordinator
writes, and only through scripts that check its term: that of the run, and where there is none yet, that of the fleet.
"The run's end" is FinishRun or CancelRun.
"""

from typing import Final

from ebbtide.types.end_cause import EndCause

#: What the fleet's keys begin with.
FLEET: Final = "ebbtide:{fleet}:"
#: string: the term of the coordinator that may write. Set when a coordinator begins to lead; never ends.
TERM: Final = FLEET + "term"
#: string: the number of the layout of all that lies here; see `migrations`. Set at a coordinator's start; never ends.
SCHEMA: Final = FLEET + "schema"
#: The layout's number as this program writes it: that of the last of `migrations.STEPS`.
NEWEST_SCHEMA: Final = 1
#: string with an expiry: the term and the address of the coordinator that leads, a space between them. Owner: lead.
LEADER: Final = FLEET + "leader"
#: string: the life of the store in which all runs were settled last; see `Runs.settle`. Never ends.
LIFE: Final = FLEET + "life"
#: string: 32 bytes that the publishers' keys of all runs are derived from. Made by the first coordinator; never changes
#: and never ends.
PUBLISHERS: Final = FLEET + "publishers"
#: zset run id -> order of submission. A run comes with its record, and goes when that has expired.
INDEX: Final = FLEET + "runs"

#: name -> suffix behind the run's prefix.
RUN_KEYS: Final[dict[str, str]] = {
    # hash: spec, status, message, created (ms, the store's clock), seq (next place in line), version (last number
    # reserved), events (last number given), newest, newest_record. Owner: submit_run, lease_claim, announce_version,
    # end_run. Expires some days after the run's end.
    "RUN": "run",
    # hash: counter -> integer, and `dropped:REASON`. Each changes in the script that makes the transition. Expires
    # with RUN.
    "COUNT": "count",
    # stream: k(ind), key, m(essage), v(alues) and l(abels) as JSON, at (ms since submission). The facts of
    # lib.lua. Expires with RUN.
    "EVENTS": "events",
    # stream like EVENTS, of all that is no fact. Capped. Expires with RUN.
    "CHATTER": "chatter",
    # set: `kind:key` of events, so that a repeat is dropped. Expires with RUN.
    "EVENT_KEYS": "eventkeys",
    # stream: r(ollout), a(ttempt), w(orker), f(irst) and l(ast) token, b(egin) and e(nd) in ms since submission, why,
    # v(ersions of its first and last token, u32 each), c(ause, a number of `EndCause`; 0.1.0 wrote none): an entry per
    # attempt that has ended. Capped. Owner: lib. Expires with RUN.
    "SPANS": "spans",
    # hash: term, `lease:ROLE` -> fence, and `r:ROLLOUT` -> "ATTEMPT:stored" for each running rollout: what every
    # write compares. Owner: claim_term, lease_*, place, append, requeue. Deleted at the run's end, which bars all
    # further writes.
    "FENCE": "fence",
    # string with an expiry: the role's holder; gone once the lease was not renewed in time. (The role follows the
    # suffix.)
    "CLAIM": "claim:",
    # hash: version -> msgpack of its PolicyVersion, all that were announced. Deleted at the run's end.
    "VERSIONS": "versions",
    # zset: rollout -> place in line, of queued and running ones. A member leaves when it finishes, is cancelled or
    # completed.
    "OPEN": "open",
    # hash per rollout: req (msgpack, without the prompt), prompt, digest, kind, state, attempt, attempts, worker,
    # from, begin (ms since submission), barren, evidence, avoid (workers, a comma behind each), reason, message,
    # cursor. Owner: submit .. complete. Deleted when acknowledged, completed, cancelled, or at the run's end.
    "ROLLOUT": "rollout:",
    # string per rollout: its token records so far. Owner: append. Ends with ROLLOUT.
    "TOKENS": "tokens:",
    # stream: id -> rollout, finished ones that nobody has acknowledged or completed. An entry ends with ROLLOUT.
    "FINISHED": "finished",
    # set: `r:ROLLOUT` and `e:EPISODE` that are over, so that a late repeat is known. Some 50 bytes each. Deleted at
    # the run's end.
    "DONE": "done",
    # stream: n (training rollouts it stands for), data (msgpack of the Trajectory), at (ms). Deleted when committed.
    "TRAJECTORIES": "trajectories",
}


def run_prefix(run_id: str) -> str:
    """What all keys of the run begin with."""
    return f"ebbtide:{{{run_id}}}:"


def run_key(run_id: str, name: str, member: str = "") -> str:
    """The key `name` of `RUN_KEYS` in the run; `member` for those kept per rollout or role."""
    return run_prefix(run_id) + RUN_KEYS[name] + member


#: The fleet's keys that scripts touch.
FLEET_KEYS: Final = {"TERM": TERM, "SCHEMA": SCHEMA, "LEADER": LEADER, "INDEX": INDEX, "LIFE": LIFE}


def lua_constants() -> str:
    """Lua that names the fleet's keys, those of the run whose prefix is `KEYS[1]`, and the causes of ends."""
    fleet = "".join(f"local {name} = '{key}'\n" for name, key in FLEET_KEYS.items())
    fleet += f"local NEWEST_SCHEMA = '{NEWEST_SCHEMA}'\n"
    fleet += f"local CAUSE = {{{', '.join(f'{cause.name} = {cause}' for cause in EndCause)}}}\n"
    return fleet + "".join(f"local {name} = KEYS[1] .. '{suffix}'\n" for name, suffix in RUN_KEYS.items())
