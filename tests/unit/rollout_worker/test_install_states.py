"""The installer's transitions: what each leads to and demands, and that every way leads back to rest."""

from itertools import product

import pytest

from ebbtide.rollout_worker.installs.install_states import (
    BUSY,
    DROPPABLE,
    HOLDING,
    SETTLED,
    Action,
    InstallEvent,
    InstallState,
    transition,
)

S, E, D = InstallState, InstallEvent, Action
BACK = (D.TELL, D.GIVE_BACK)

TABLE = [
    (S.IDLE, E.BEGIN, S.PULLING, (D.TELL,)),
    (S.IDLE, E.REST, S.RESTING, ()),
    (S.IDLE, E.RESTORE, S.RESTORING, ()),
    (S.PULLING, E.LOCKED, S.WAITING_FOR_LENDER, ()),
    (S.PULLING, E.FORBIDDEN, S.WAITING_FOR_ATTEMPTS, ()),
    (S.PULLING, E.END, S.IDLE, BACK),
    (S.WAITING_FOR_ATTEMPTS, E.ADMITTED, S.PULLING, ()),
    (S.WAITING_FOR_ATTEMPTS, E.END, S.IDLE, BACK),
    (S.WAITING_FOR_LENDER, E.FORBIDDEN, S.WAITING_FOR_ATTEMPTS, ()),
    (S.WAITING_FOR_LENDER, E.CHANGE, S.CHANGING_ENGINE, (D.HOLD,)),
    (S.WAITING_FOR_LENDER, E.INSTALL, S.INSTALLING, (D.HOLD,)),
    (S.WAITING_FOR_LENDER, E.END, S.IDLE, BACK),
    (S.CHANGING_ENGINE, E.INSTALL, S.INSTALLING, ()),
    (S.CHANGING_ENGINE, E.DONE, S.REPORTING, (D.RELEASE,)),
    (S.INSTALLING, E.DONE, S.REPORTING, (D.RELEASE,)),
    (S.REPORTING, E.END, S.IDLE, BACK),
    (S.RESTING, E.RESTORE, S.RESTORING, ()),
    (S.RESTORING, E.INSTALL, S.RELOADING, (D.HOLD,)),
    (S.RESTORING, E.NOT_NOW, S.RESTING, (D.GIVE_BACK,)),
    (S.RESTORING, E.END, S.IDLE, (D.GIVE_BACK, D.WAKE)),
    (S.RELOADING, E.DONE, S.RESTORING, (D.RELEASE,)),
]
ALLOWED = {(before, event) for before, event, *_ in TABLE}


@pytest.mark.parametrize(("before", "event", "after", "actions"), TABLE, ids=lambda one: getattr(one, "name", None))
def test_each_transition(
    before: InstallState, event: InstallEvent, after: InstallState, actions: tuple[Action, ...]
) -> None:
    assert transition(before, event) == (after, actions)


def test_all_other_events_are_refused() -> None:
    for before, event in product(S, E):
        if (before, event) not in ALLOWED:
            with pytest.raises(ValueError, match=f"{event.name} is impossible in {before.name}"):
                transition(before, event)


def test_every_state_is_reached_from_the_first_and_leads_back_to_it() -> None:
    leads_to = {state: {after for before, _, after, _ in TABLE if before is state} for state in S}
    for start in S:
        reached, new = {start}, {start}
        while new := {after for state in new for after in leads_to[state]} - reached:
            reached |= new
        assert reached == set(S), start.name


def test_a_target_is_dropped_only_while_the_engine_is_untouched() -> None:
    assert not DROPPABLE & HOLDING
    assert DROPPABLE < BUSY
    assert all((state, E.END) in ALLOWED for state in DROPPABLE)
    assert not SETTLED & (BUSY | HOLDING)
