"""A step is taken for a scoring where it must be one, or where all lately were."""

from ebbtide.driver.scoring import LEARNT, FinalTurns


def learnt(turn: int, took_s: float = 1.0) -> FinalTurns:
    turns = FinalTurns()
    for _ in range(LEARNT):
        turns.note(turn, took_s, ended=True)
    return turns


def test_the_last_turn_that_a_run_allows_scores_from_the_first_episode_on() -> None:
    assert FinalTurns().scores(0, last=True)
    assert not FinalTurns().scores(0, last=False)


def test_a_turn_that_always_ended_its_episodes_is_learnt_and_one_that_does_not_is_unlearnt() -> None:
    turns = learnt(0)
    assert turns.scores(0, last=False)
    turns.note(0, 1.0, ended=False)
    assert not turns.scores(0, last=False)


def test_an_episode_whose_replay_takes_longer_than_its_scoring_stays_where_it_is() -> None:
    turns = learnt(2)
    turns.note(0, 0.4, ended=False)
    turns.note(1, 0.4, ended=False)
    assert turns.scores(2, last=True)
    turns.note(1, 9.0, ended=False)
    assert not turns.scores(2, last=True)
