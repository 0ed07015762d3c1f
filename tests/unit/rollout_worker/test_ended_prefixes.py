"""What ended is evicted first from vLLM's own pool of blocks, unless it is in use, shared, or other content by now."""

from collections.abc import Sequence
from typing import Any

import pytest

from ebbtide.rollout_worker.engine.vllm.kv_cache import EndedPrefixes

block_pool = pytest.importorskip("vllm.v1.core.block_pool")
kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")


class Engine:
    """A pool of so many blocks, and the texts that its requests left there."""

    def __init__(self, blocks: int = 16) -> None:
        self.pool = block_pool.BlockPool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=16)
        self.ended = EndedPrefixes(self.pool)

    def run(self, text: str, *, group: int = 0) -> list[Any]:
        """A request begins: each letter of its text stands for a block, of which what is cached is used again."""
        held: list[Any] = []
        for end in range(1, len(text) + 1):
            content = text[:end].encode().ljust(32)
            cached = self.pool.get_cached_block(content, [group])
            if cached:
                self.pool.touch(cached)
                held.append(cached[0])
            else:
                (block,) = self.pool.get_new_blocks(1)
                known = kv_cache_utils.make_block_hash_with_group_id(content, group)
                self.pool._insert_block_hash(known, block, 16)
                held.append(block)
        return held

    def finish(self, name: str, held: Sequence[Any]) -> None:
        blocks = [*held, *self.pool.get_new_blocks(1)]  # the last one is not full
        self.ended.note(name, [blocks])
        self.pool.free_blocks(reversed(blocks))

    def serve(self, name: str, text: str) -> None:
        self.finish(name, self.run(text))

    def fill(self, blocks: int) -> None:
        """Another request needs so much room."""
        self.pool.get_new_blocks(blocks)

    def cached(self, text: str) -> str:
        """The part of a text that a request would find."""
        end = 0
        while end < len(text) and self.pool.get_cached_block(text[: end + 1].encode().ljust(32), [0]):
            end += 1
        return text[:end]

    @property
    def free(self) -> int:
        return int(self.pool.get_num_free_blocks())


def test_an_ended_text_goes_first_with_its_end_before_its_begin() -> None:
    engine = Engine()
    engine.serve("old", "abc")
    engine.serve("new", "xyz")
    engine.ended.forget("new")
    engine.fill(1)
    assert (engine.cached("xyz"), engine.cached("abc")) == ("xy", "abc")


@pytest.mark.parametrize("tells", [False, True])
def test_what_a_waiting_text_shares_with_an_ended_one_stays(*, tells: bool) -> None:
    """A group's prompt, or a system prompt, and the answers of two episodes."""
    engine = Engine(16)
    engine.serve("older", "uvw")
    engine.serve("waits", "ssab")
    engine.serve("ends", "sscd")
    if tells:
        engine.ended.forget("ends")
    engine.fill(engine.free - 9 + 2)  # two of the nine blocks with content
    assert engine.cached("ssab") == "ssab"
    assert engine.cached("uvw") == ("uvw" if tells else "u")
    assert engine.cached("sscd") == ("ss" if tells else "sscd")


def test_what_was_shared_goes_with_the_last_text_that_has_it() -> None:
    engine = Engine()
    engine.serve("old", "abc")
    engine.serve("one", "ssx")
    engine.serve("two", "ssy")
    engine.ended.forget("one")
    engine.ended.forget("two")
    engine.fill(engine.free - 3)
    assert (engine.cached("abc"), engine.cached("ss")) == ("abc", "")
    assert engine.ended.remembered == 3


def test_a_text_takes_the_place_of_the_turn_before_it() -> None:
    engine = Engine()
    engine.serve("old", "abc")
    engine.serve("episode", "xy")
    engine.serve("episode", "xyz")
    assert engine.ended.remembered == 6
    engine.ended.forget("episode")
    assert engine.ended.remembered == 3
    engine.fill(engine.free - 3)
    assert (engine.cached("abc"), engine.cached("xyz")) == ("abc", "")


def test_an_equal_text_of_another_episode_counts_for_itself() -> None:
    engine = Engine()
    engine.serve("waits", "xyz")
    engine.serve("ends", "xyz")
    engine.serve("new", "abc")
    engine.ended.forget("ends")
    engine.ended.forget("ends")
    engine.ended.forget("unknown")
    engine.fill(engine.free - 3)
    assert (engine.cached("abc"), engine.cached("xyz")) == ("abc", "")  # as the oldest one, not as an ended one
    engine.ended.forget("waits")
    assert engine.ended.remembered == 3


def test_blocks_that_are_in_use_or_have_other_content_stay_where_they_are() -> None:
    engine = Engine()
    engine.serve("ended", "abcd")
    used = engine.run("ab")
    engine.fill(engine.free)  # the others have no content now
    engine.ended.forget("ended")
    assert engine.free == 0
    engine.pool.free_blocks(reversed(used))
    assert engine.cached("abcd") == "ab"


def test_no_more_blocks_are_remembered_than_the_pool_has() -> None:
    engine = Engine(12)
    for number in range(50):
        engine.serve(f"episode {number}", "s" + chr(65 + number) * 3)
        assert engine.ended.remembered <= 12
    for number in range(50):
        engine.ended.forget(f"episode {number}")
    assert engine.ended.remembered == 0


def test_no_more_texts_are_remembered_than_the_pool_has_blocks() -> None:
    """All of them are one block: the first ones are forgotten, and then it is moved with the last of the others."""
    engine = Engine(8)
    engine.serve("old", "x")
    for number in range(100):
        engine.serve(f"episode {number}", "s")
    for number in range(92):
        engine.ended.forget(f"episode {number}")
    assert engine.ended.remembered == 1
    for number in range(92, 100):
        engine.ended.forget(f"episode {number}")
    engine.fill(engine.free - 1)
    assert (engine.cached("x"), engine.cached("s")) == ("x", "")


def test_a_text_has_blocks_of_each_group_of_layers() -> None:
    """The second group attends to a window, and keeps no block of what is before it."""
    engine = Engine(32)
    for name, text in (("old", "uvw"), ("one", "abcd"), ("two", "abef")):
        whole, window = engine.run(text), engine.run(text, group=1)
        engine.ended.note(name, [whole, [engine.pool.null_block, *window[1:]]])
        engine.pool.free_blocks([*reversed(whole), *reversed(window)])
    assert engine.ended.remembered == 3 + 2 + 6 + 5
    engine.ended.forget("one")
    assert engine.ended.remembered == 3 + 2 + 4 + 3
    engine.ended.forget("two")
    assert engine.ended.remembered == 3 + 2
