"""What ended is evicted first, unless it is in use or its memory has other content by now."""

from dataclasses import dataclass, field

from ebbtide.rollout_worker.engine.vllm.ended_prefixes import EndedPrefixes


@dataclass(eq=False)
class Block:
    name: str
    block_hash: str | None
    ref_cnt: int = 0


@dataclass
class FreeBlocks:
    """vLLM's queue of free blocks: the first one is evicted first."""

    order: list[Block] = field(default_factory=list)

    def remove(self, block: Block) -> None:
        self.order.remove(block)

    def prepend_n(self, blocks: list[Block]) -> None:
        self.order[:0] = blocks


class Pool:
    def __init__(self) -> None:
        self.free_block_queue = FreeBlocks()
        self.prefixes = EndedPrefixes(self)

    def finished(self, name: str, count: int) -> list[Block]:
        """A request finishes with so many whole blocks, and one that is not full."""
        blocks = [Block(f"{name}{number}", f"hash {name}{number}") for number in range(count)]
        blocks.append(Block(f"{name} rest", None))
        self.prefixes.note(name, [blocks])
        self.free_block_queue.order += reversed(blocks[:-1])
        return blocks

    @property
    def order(self) -> list[str]:
        return [block.name for block in self.free_block_queue.order]


def test_an_ended_text_goes_first_with_its_end_before_its_begin() -> None:
    pool = Pool()
    pool.finished("old", 2)
    pool.finished("new", 3)
    pool.prefixes.forget("new")
    assert pool.order == ["new2", "new1", "new0", "old1", "old0"]


def test_blocks_that_are_in_use_or_have_other_content_stay_where_they_are() -> None:
    pool = Pool()
    pool.finished("old", 1)
    used, replaced, still = pool.finished("new", 3)[:3]
    used.ref_cnt, replaced.block_hash = 1, "other"
    pool.free_block_queue.remove(used)
    pool.prefixes.forget("new")
    assert pool.order == [still.name, "old0", replaced.name]


def test_unknown_names_and_repeats_change_nothing() -> None:
    pool = Pool()
    pool.finished("a", 2)
    pool.finished("b", 1)
    pool.prefixes.forget("c")
    pool.prefixes.forget("b")
    pool.prefixes.forget("b")
    assert pool.order == ["b0", "a1", "a0"]
