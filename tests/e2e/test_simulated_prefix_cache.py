"""The simulated engine finds the same tokens in its cache as vLLM's own cache manager, turn for turn."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from ebbtide.rollout_worker.engine.vllm.kv_cache import EndedPrefixes
from ebbtide.simulator.engines.simulated_engine import SimulatedEngine
from tests.unit.simulator.made_up_profiles import engine_profile

BLOCK = 16
SESSIONS = 12


class Turn(NamedTuple):
    key: str
    episode: str
    ended: str  # the episode that its session has ended before; empty: none
    earlier: tuple[str, ...]
    prompt: list[int]
    response: list[int]
    elsewhere: bool  # another engine has it


def turns(seed: int, count: int) -> Iterator[Turn]:
    """Turns of a few sessions in turn, of which other engines have some."""
    draw = random.Random(seed)
    episode = {session: f"{session}.first" for session in range(SESSIONS)}
    history = {session: list[int]() for session in range(SESSIONS)}
    earlier = dict.fromkeys(range(SESSIONS), tuple[str, ...]())

    def tokens(most: int) -> list[int]:
        return [draw.randrange(50_000) for _ in range(draw.randint(1, most))]

    for number in range(count):
        session, ended = draw.randrange(SESSIONS), ""
        if len(history[session]) > 1_200:
            history[session], earlier[session] = [], ()
            ended, episode[session] = episode[session], f"{session}.{number}"
        prompt, response = history[session] + tokens(300), tokens(120)
        key, elsewhere = f"{session}.{number}", bool(earlier[session]) and draw.random() < 0.25
        yield Turn(key, episode[session], ended, earlier[session], prompt, response, elsewhere)
        history[session], earlier[session] = prompt + response, (key, *earlier[session])


class VllmCache:
    """vLLM's cache manager with so many blocks, without an engine."""

    def __init__(self, blocks: int) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        # One block is never used: vLLM keeps it as a placeholder.
        config = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
        self._cache: Any = KVCacheManager(
            config, max_model_len=1 << 16, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        self.ended = EndedPrefixes(self._cache.block_pool)

    def found(self, turn: Turn) -> int:
        """Play a turn from begin to end. Returns the tokens that were in the cache."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        terms = SamplingParams(max_tokens=len(turn.response))
        request = Request(turn.key, list(turn.prompt), terms, None, block_hasher=self._hasher)
        blocks, found, *_ = self._cache.get_computed_blocks(request)
        assert self._cache.allocate_slots(request, len(turn.prompt) - found, found, blocks) is not None
        request.num_computed_tokens = len(turn.prompt)
        for token in turn.response[:-1]:
            request.append_output_token_ids(token)
            assert self._cache.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        request.append_output_token_ids(turn.response[-1])
        self.ended.note(turn.episode, self._cache.get_blocks(turn.key).blocks)
        self._cache.free(request)
        return int(found)


@pytest.mark.parametrize("blocks", [110, 200, 400, 2_000])
@pytest.mark.parametrize("told", [False, True])
def test_it_finds_what_vllm_finds(blocks: int, *, told: bool) -> None:
    """`told`: which episodes have ended."""
    pytest.importorskip("vllm")
    real = VllmCache(blocks)
    engine = SimulatedEngine(engine_profile(tokens=blocks * BLOCK, block=BLOCK, batched=1 << 20), slots=1, now=0.0)
    now, found = 0.0, 0
    for turn in turns(blocks, 300):
        if told and turn.ended:
            engine.forget([turn.ended])
            real.ended.forget(turn.ended)
        if turn.elsewhere:
            continue
        read = engine.read
        engine.admit(
            turn.key,
            prompt=len(turn.prompt),
            made=0,
            length=len(turn.response),
            now=now,
            after=turn.earlier,
            text=turn.episode,
        )
        now += 1e4
        engine.advance(now)
        here = len(turn.prompt) - (engine.read - read)
        assert here == real.found(turn)
        found += here
    assert found > 0
