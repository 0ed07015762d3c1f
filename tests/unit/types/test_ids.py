"""Ids that follow from what a client asked for."""

from ebbtide.types.ids import check_id, rollout_id_of_request

ASKED = ("run", "user-a", "session", "request ü / 1", 0)


def test_a_request_has_the_same_rollouts_wherever_it_is_asked_again() -> None:
    assert rollout_id_of_request(*ASKED) == rollout_id_of_request(*ASKED)
    assert check_id(rollout_id_of_request(*ASKED), field="id") == rollout_id_of_request(*ASKED)


def test_requests_that_differ_in_anything_share_no_rollout() -> None:
    """Also where the texts would be the same if they were joined."""
    others = [
        ("run2", *ASKED[1:]), ("run", "user-b", *ASKED[2:]), ("run", "user-a", "", *ASKED[3:]), (*ASKED[:4], 1),
        ("runuser-a", "", *ASKED[2:]), ("run", "user-a", "sessionrequest ü / 1", "", 0),
    ]  # fmt: skip
    found = {rollout_id_of_request(*one) for one in (ASKED, *others)}
    assert len(found) == 1 + len(others)
