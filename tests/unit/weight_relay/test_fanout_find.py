"""What FindWay takes from holders: no address that others are not to be sent to, nothing of runs that are not here."""

from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.transfer.version_finder import PathRequest
from ebbtide.types.weights import Holder
from tests.integration.weight_relay.lines import Line
from tests.unit.weight_relay.relays import SMALL, publish, relay_at


def done(address: str = "w0:1", run_id: str = "run") -> PathRequest:
    holder = Holder(name="w0", address=address)
    return PathRequest(run_id=run_id, policy="policy", version=1, holder=holder, done=True)


@pytest.mark.parametrize(
    "address", ["http://169.254.169.254/latest", "https://x/y", "unix:/run/x.sock", "dns:///x:1", "x", "x:y", "a b:1"]
)
async def test_a_holder_names_no_address_but_host_and_port(tmp_path: Path, address: str) -> None:
    relay = relay_at(tmp_path)
    fanout = relay.fanout
    await publish(relay, Line(1, sizes=SMALL)[1])
    with pytest.raises(InvalidRequest, match=r"holder\.address: .*give host:port"):
        await fanout.find(done(address))
    assert fanout.holders.states("run") == ([], 0)
    await fanout.find(done())
    assert [state.holder.name for state in fanout.holders.states("run")[0]] == ["w0"]
    await relay.close()


async def test_who_has_versions_of_what_is_not_here_is_not_noted(tmp_path: Path) -> None:
    relay = relay_at(tmp_path)
    fanout = relay.fanout
    await fanout.find(done(run_id="unheard-of"))
    assert fanout.holders.states("unheard-of") == ([], 0)
    assert fanout.holders.needed() == set()
    await relay.intake.begin(Line(1, sizes=SMALL)[1].manifest)
    await fanout.find(done())  # its version is on its way
    assert len(fanout.holders.states("run")[0]) == 1
    await relay.close()
