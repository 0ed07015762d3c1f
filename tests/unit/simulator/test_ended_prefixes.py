"""What ended makes room first in a simulated cache, too; what a group shares does not."""

from ebbtide.simulator.engines.engine_profile import KvCapacity
from ebbtide.simulator.engines.kv_prefixes import KvPrefixes


def cache(*, ends: str = "") -> KvPrefixes:
    """Ten blocks: first a text of four that waits, then one of four in two parts that has ended, if so."""
    kept = KvPrefixes(KvCapacity(tokens=160, block=16))
    for name, parent in (("waits", None), ("ended.0", None), ("ended.1", "ended.0")):
        before = kept.find(parent, 10) if parent else None
        if before is not None:
            kept.hold(before)
        start, blocks = (before.end, 4) if before else (0, 4 if name == "waits" else 2)
        kept.take(blocks - start)
        kept.release(name, before, start, blocks * 16, kept.salt)
    if ends:
        kept.end(ends)
    return kept


def test_the_older_text_goes_first_unless_the_later_one_has_ended() -> None:
    for ends, left in (("", ("ended.1",)), ("ended.1", ("waits",)), ("unknown", ("ended.1",))):
        kept = cache(ends=ends)
        kept.take(6)
        for name in ("waits", "ended.1"):
            found = kept.find(name, 10)
            assert (found is not None and found.end == 4) == (name in left), (ends, name)


def test_a_text_in_use_ends_without_effect() -> None:
    kept = cache()
    held = kept.find("ended.1", 10)
    assert held is not None
    kept.hold(held)
    kept.end("ended.1")
    kept.take(6)
    assert kept.find("ended.1", 10) is held
