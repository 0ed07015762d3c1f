"""What a client's key may use of a run: requests and tokens by minute, budgets, and requests at once."""

import random

import pytest
from msgspec.structs import replace

from ebbtide.coordinator.api.key_accounts import KeyCharge, KeyEntry, admit_charge
from ebbtide.errors import BudgetSpent, RateLimited
from ebbtide.types.session import KeyBalance, KeyLimits

ONE = KeyCharge(requests=1, tokens=10)
NIGHT_S = 3600.0


def admit(limits: KeyLimits, balance: KeyBalance, charge: KeyCharge = ONE) -> KeyEntry:
    return admit_charge(limits, balance, charge, until_midnight_s=NIGHT_S)


def charged(balance: KeyBalance, entry: KeyEntry, charge: KeyCharge = ONE) -> KeyBalance:
    """The account after a submit."""
    return replace(
        balance,
        reserved=balance.reserved + charge.tokens,
        open=balance.open + charge.requests,
        request_debt=balance.request_debt + entry.request_debt,
        token_debt=balance.token_debt + entry.token_debt,
        idle_ms=0,
    )


def test_a_key_without_limits_is_never_refused() -> None:
    full = KeyBalance(spent=1 << 40, today=1 << 40, reserved=1 << 40, open=1 << 20, request_debt=1 << 40)
    assert admit(KeyLimits(), full).token_debt == 0


def test_a_minute_of_requests_may_come_at_once_and_the_next_waits_its_part_of_a_minute() -> None:
    limits, balance = KeyLimits(requests_per_minute=6), KeyBalance()
    for _ in range(6):
        balance = charged(balance, admit(limits, balance))
    with pytest.raises(RateLimited, match="6 requests a minute") as refused:
        admit(limits, balance)
    assert refused.value.retry_after_s == 10.0
    with pytest.raises(RateLimited):
        admit(limits, replace(balance, idle_ms=9_999))
    admit(limits, replace(balance, idle_ms=10_000))


def test_whoever_waits_as_long_as_told_is_admitted() -> None:
    draw = random.Random(7)
    for _ in range(300):
        limits = KeyLimits(requests_per_minute=draw.randint(1, 90), tokens_per_minute=draw.randint(1, 5000))
        balance = KeyBalance(request_debt=draw.randint(-9, 90_000), token_debt=draw.randint(-9, 9_000_000))
        charge = KeyCharge(requests=1, tokens=draw.randint(1, 9000))
        for _ in range(2):  # one wait for each rate
            try:
                admit(limits, balance, charge)
            except RateLimited as error:
                balance = replace(balance, idle_ms=balance.idle_ms + int(error.retry_after_s * 1000) + 1)
        admit(limits, balance, charge)


def test_in_the_long_run_a_rate_is_kept_and_used() -> None:
    draw, limits, balance, taken, now = random.Random(3), KeyLimits(tokens_per_minute=6000), KeyBalance(), 0, 0
    while now < 60 * 60_000:
        charge = KeyCharge(requests=1, tokens=draw.randint(1, 9000))
        step = draw.randint(1, 2000)
        now, balance = now + step, replace(balance, idle_ms=balance.idle_ms + step)
        try:
            entry = admit(limits, balance, charge)
        except RateLimited:
            continue
        balance, taken = charged(balance, entry, charge), taken + charge.tokens
    assert 0.9 * 6000 * 60 < taken <= 6000 * 60 + 6000 + 9000


def test_what_a_request_did_not_make_is_given_back_to_its_rate() -> None:
    limits, balance, charge = KeyLimits(tokens_per_minute=100), KeyBalance(), KeyCharge(requests=1, tokens=100)
    balance = charged(balance, admit(limits, balance, charge), charge)
    with pytest.raises(RateLimited):
        admit(limits, balance)
    admit(limits, replace(balance, token_debt=balance.token_debt - 90_000))


def test_a_request_of_more_than_a_minute_waits_for_an_account_without_debt() -> None:
    limits, large = KeyLimits(tokens_per_minute=100), KeyCharge(requests=1, tokens=1000)
    with pytest.raises(RateLimited) as refused:
        admit(limits, KeyBalance(token_debt=50_000), large)
    assert refused.value.retry_after_s == 30.0
    balance = charged(KeyBalance(), admit(limits, KeyBalance(), large), large)
    with pytest.raises(RateLimited) as next_one:
        admit(limits, balance)
    assert next_one.value.retry_after_s == 546.0  # until 90 of 1,000 are owed


def test_reservations_never_pass_a_budget_and_what_is_reserved_may_come_back() -> None:
    limits = KeyLimits(tokens=100)
    admit(limits, KeyBalance(spent=50, reserved=40))
    with pytest.raises(RateLimited, match="requests under way may take the rest") as waits:
        admit(limits, KeyBalance(spent=50, reserved=41))
    assert not isinstance(waits.value, BudgetSpent)
    with pytest.raises(BudgetSpent, match="has used 91 of its 100 tokens, and this request may take 10") as spent:
        admit(limits, KeyBalance(spent=91))
    assert spent.value.retry_after_s == 0.0


def test_the_budget_of_a_day_is_there_again_at_midnight() -> None:
    limits = KeyLimits(tokens_per_day=100)
    with pytest.raises(BudgetSpent, match="tokens of a day") as spent:
        admit(limits, KeyBalance(spent=95, today=95))
    assert spent.value.retry_after_s == NIGHT_S
    admit(limits, KeyBalance(spent=95, today=0))


def test_a_key_has_its_number_of_requests_at_once() -> None:
    limits = KeyLimits(requests_at_once=2)
    admit(limits, KeyBalance(open=1))
    with pytest.raises(RateLimited, match="2 requests at once"):
        admit(limits, KeyBalance(open=2))


def test_a_repeat_is_free_and_admitted_at_every_limit() -> None:
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=1, tokens=1, tokens_per_day=1, requests_at_once=1)
    full = KeyBalance(spent=9, today=9, reserved=9, open=9, request_debt=9000, token_debt=9000)
    assert admit(limits, full, KeyCharge(requests=0, tokens=0)) == KeyEntry(request_debt=0, token_debt=0)
