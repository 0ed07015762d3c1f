"""A run's versions are its publisher's alone."""

from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weights import Signer
from tests.integration.weight_relay.lines import SIGNER, Line
from tests.unit.weight_relay.relays import SMALL, publish, relay_at

OTHER = Signer(b"another publisher's secret seed!")


async def opened(folder: Path, **settings: object) -> WeightRelay:
    relay = relay_at(folder, **settings)  # type: ignore[arg-type]
    await relay.open()
    return relay


async def test_the_first_key_of_a_run_is_its_key_also_after_a_restart(tmp_path: Path) -> None:
    relay = await opened(tmp_path)
    line = Line(2, sizes=SMALL)
    await publish(relay, line[1])
    for _ in range(2):
        with pytest.raises(PermissionDenied, match="another key"):
            await relay.intake.begin(Line(2, sizes=SMALL, signer=OTHER)[2].manifest)
        with pytest.raises(PermissionDenied, match="another key"):
            await relay.intake.begin(Line(2, sizes=SMALL, signer=None)[2].manifest)
        await relay.intake.begin(Line(1, sizes=SMALL, signer=OTHER, run_id="other")[1].manifest)
        await relay.close()
        relay = await opened(tmp_path)
    await relay.intake.begin(line[2].manifest)
    await relay.close()


async def test_a_key_that_is_known_beforehand_is_the_only_one(tmp_path: Path) -> None:
    relay = await opened(tmp_path, publisher_keys=(f"run={OTHER.public.hex()}",))
    with pytest.raises(PermissionDenied, match=r"another key .* --publisher-keys: publish under another run id"):
        await relay.intake.begin(Line(1, sizes=SMALL)[1].manifest)
    await relay.intake.begin(Line(1, sizes=SMALL, signer=OTHER)[1].manifest)
    await relay.close()


async def test_a_key_of_the_settings_that_is_not_the_pinned_one_is_told_at_the_start(tmp_path: Path) -> None:
    relay = await opened(tmp_path)
    await relay.intake.begin(Line(1, sizes=SMALL)[1].manifest)
    await relay.close()
    relay = relay_at(tmp_path, publisher_keys=(f"run={OTHER.public.hex()}",))
    with pytest.raises(InvalidRequest, match=r"publisher_keys: .*keys/run in the data_dir; remove one"):
        await relay.open()
    await relay.close()
    relay = await opened(tmp_path, publisher_keys=(f"run={SIGNER.public.hex()}",))
    await relay.close()


async def test_a_folder_among_the_keys_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "keys" / "odd").mkdir(parents=True)
    relay = relay_at(tmp_path)
    with pytest.raises(InvalidRequest, match=r"keys/odd is no readable file .*; remove it"):
        await relay.open()
    await relay.close()


async def test_a_refused_version_pins_no_key(tmp_path: Path) -> None:
    relay = await opened(tmp_path, budget_bytes=1 << 20)
    big = {"w": ("U8", "|u1", (1 << 20) + 1)}
    with pytest.raises(InvalidRequest):
        await relay.intake.begin(Line(1, sizes=big, signer=OTHER)[1].manifest)
    await publish(relay, Line(1, sizes=SMALL)[1])
    await relay.close()


async def test_unsigned_versions_are_taken_only_where_that_is_allowed(tmp_path: Path) -> None:
    unsigned = Line(1, sizes=SMALL, signer=None)[1].manifest
    relay = await opened(tmp_path, allow_unsigned=False)
    with pytest.raises(PermissionDenied, match="--allow-unsigned"):
        await relay.intake.begin(unsigned)
    await relay.close()
    relay = await opened(tmp_path, allow_unsigned=True)
    assert await relay.intake.begin(unsigned)
    await relay.close()


async def test_a_signature_of_other_content_is_none(tmp_path: Path) -> None:
    relay = await opened(tmp_path)
    line, other = Line(1, sizes=SMALL)[1].manifest, Line(1, sizes=SMALL, seed=5)[1].manifest
    swapped = type(line)(
        run_id=line.run_id,
        version=line.version,
        tile_bytes=line.tile_bytes,
        tensors=line.tensors,
        publisher=SIGNER.public,
        signature=other.signature,
    )
    with pytest.raises(PermissionDenied, match="publisher's key"):
        await relay.intake.begin(swapped)
    await relay.close()


@pytest.mark.parametrize("text", ["run", "run=00", "run=xy", "../x=" + 64 * "0"])
def test_a_key_that_is_none_keeps_the_relay_from_starting(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="publisher_keys"):
        relay_at(tmp_path, publisher_keys=(text,))


async def test_a_damaged_pin_keeps_the_relay_from_starting(tmp_path: Path) -> None:
    relay = await opened(tmp_path)
    await publish(relay, Line(1, sizes=SMALL)[1])
    await relay.close()
    (tmp_path / "keys" / "run").write_text("00")
    relay = relay_at(tmp_path)
    with pytest.raises(InvalidRequest, match="keys/run"):
        await relay.open()
    await relay.close()
