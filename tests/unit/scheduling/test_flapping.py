"""Who comes and goes too often gets no work for a while."""

from ebbtide.scheduling.flapping import Flapping


def test_one_loss_is_forgiven_and_the_pauses_double_from_the_second_on() -> None:
    flapping, pauses = Flapping(), []
    for number in range(10):
        flapping.lost("w", float(number))
        pauses.append(flapping.shunned_s("w", float(number)))
    assert pauses == [0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    assert flapping.shunned_s("w", 109.0) == 200.0
    assert flapping.shunned_s("w", 309.0) == 0.0


def test_who_has_stayed_long_enough_starts_anew() -> None:
    flapping = Flapping()
    flapping.lost("w", 0.0)
    flapping.lost("w", 700.0)
    assert flapping.shunned_s("w", 700.0) == 0.0


def test_workers_are_judged_by_their_own_losses() -> None:
    flapping = Flapping()
    for _ in range(3):
        flapping.lost("w", 0.0)
    assert flapping.shunned_s("v", 0.0) == 0.0
