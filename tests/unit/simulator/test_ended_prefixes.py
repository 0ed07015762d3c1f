"""What ended makes room first in a simulated cache, too, and what another text shares with it does not."""

from ebbtide.simulator.engines.engine_profile import KvCapacity
from ebbtide.simulator.engines.kv_prefixes import KvPrefixes


def cache(*, ends: str = "") -> KvPrefixes:
    """Ten blocks: first a text of four that waits, then one of four in two turns that has ended, if so."""
    kept = KvPrefixes(KvCapacity(tokens=160, block=16))
    for name, parent, text in (("waits", None, "waiting"), ("1", None, "ended"), ("2", "1", "ended")):
        before = kept.find(parent, 10) if parent else None
        if before is not None:
            kept.hold(before)
        start, blocks = (before.end, 4) if before else (0, 4 if name == "waits" else 2)
        kept.take(blocks - start)
        kept.release(name, before, start, blocks * 16, kept.salt, text=text)
    if ends:
        kept.end(ends)
    return kept


def group_of(*texts: str) -> KvPrefixes:
    """Ten blocks: a text of two that is older, and then those of a group, with a prompt of two and answers of one."""
    kept = KvPrefixes(KvCapacity(tokens=160, block=16))
    kept.take(2)
    kept.release("older", None, 0, 32, kept.salt)
    prompt = kept.begin("prompt")
    for _ in texts:
        kept.hold(prompt)
    kept.take(2 + len(texts))
    prompt.blocks = 2
    for text in texts:
        kept.release(text, prompt, 2, 48, kept.salt)
    return kept


def left(kept: KvPrefixes, name: str) -> int:
    """Blocks that are found under a name."""
    found = kept.find(name, 10)
    return found.end if found else 0


def test_the_older_text_goes_first_unless_the_later_one_has_ended() -> None:
    for ends, stays in (("", "2"), ("ended", "waits"), ("unknown", "2")):
        kept = cache(ends=ends)
        kept.take(6)
        for name in ("waits", "2"):
            assert (left(kept, name) == 4) == (name == stays), (ends, name)


def test_a_text_in_use_ends_without_effect() -> None:
    kept = cache()
    held = kept.find("2", 10)
    assert held is not None
    kept.hold(held)
    kept.end("ended")
    kept.take(6)
    assert kept.find("2", 10) is held


def test_a_groups_prompt_stays_for_those_of_the_group_that_wait() -> None:
    kept = group_of("waits", "ends")
    kept.end("ends")
    kept.take(5)
    assert (left(kept, "waits"), left(kept, "older")) == (3, 2)
    kept.take(1)
    assert (left(kept, "waits"), left(kept, "older")) == (3, 1)


def test_a_groups_prompt_goes_with_the_last_one_of_the_group() -> None:
    kept = group_of("one", "two")
    kept.end("one")
    kept.end("two")
    kept.take(8)
    assert (left(kept, "prompt"), left(kept, "older")) == (0, 2)


def test_no_more_texts_are_remembered_than_there_are_blocks() -> None:
    kept = group_of("first", *(f"text {number}" for number in range(3)))
    prompt = kept.find("prompt", 2)
    assert prompt is not None
    for number in range(20):
        kept.hold(prompt)
        kept.release(f"more {number}", prompt, 2, 32, kept.salt)
        assert len(prompt.texts) <= 10
    assert "first" not in prompt.texts
