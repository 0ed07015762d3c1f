"""The tenants benchmark runs from end to end."""

from benchmarks.tenants import measure


async def test_a_user_is_measured_alone_and_beside_another() -> None:
    found = await measure(["requests"], rounds=1, seconds=0.5)
    operations = found["kinds"]["requests"]["operations"]
    assert operations.keys() == {"ack", "acknowledge", "first_token", "result", "submit"}
    assert all(min(one["samples"]) > 0 for one in operations.values())
    assert found["worst_p99_ratio"] == max(one["p99_ratio"] for one in operations.values()) > 0
