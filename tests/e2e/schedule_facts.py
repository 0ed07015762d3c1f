"""What vLLM's scheduler does with given work, as JSON on stdout: in a process of its own, whose engine runs within it.

Arguments: a checkpoint, blocks of memory, tokens of a block, tokens of a step. On stdin, as JSON, lists of work, done
one after another: prompts and the tokens of their responses.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CONFIGURE_LOGGING="0")

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

Facts = dict[str, Any]


class WatchedScheduler(Scheduler):  # type: ignore[misc]
    """Notes what it decides."""

    steps = tokens = 0
    preempted: ClassVar[list[int]] = []

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        output = super().schedule(*arguments, **options)
        WatchedScheduler.steps += output.total_num_scheduled_tokens > 0
        WatchedScheduler.tokens += output.total_num_scheduled_tokens
        return output

    def _preempt_request(self, request: Any, *arguments: Any, **options: Any) -> None:
        WatchedScheduler.preempted.append(int(request.request_id.partition("-")[0]))
        super()._preempt_request(request, *arguments, **options)


def work(llm: LLM, requests: Sequence[tuple[list[int], int]]) -> Facts:
    WatchedScheduler.steps = WatchedScheduler.tokens = 0
    WatchedScheduler.preempted = []
    llm.reset_prefix_cache()
    params = [
        SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True, detokenize=False)
        for _, length in requests
    ]
    done = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
    first = min(int(one.request_id) for one in done)
    return {
        "lengths": [len(one.outputs[0].token_ids) for one in done],
        "steps": WatchedScheduler.steps,
        "tokens": WatchedScheduler.tokens,
        "preempted": [number - first for number in WatchedScheduler.preempted],
    }


def main(checkpoint: str, blocks: str, block: str, batched_tokens: str) -> None:
    llm = LLM(
        checkpoint,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=int(blocks),
        block_size=int(block),
        max_num_seqs=16,
        max_num_batched_tokens=int(batched_tokens),
        scheduling_policy="priority",  # as a worker's engine
        scheduler_cls=WatchedScheduler,
    )
    done = [work(llm, requests) for requests in json.load(sys.stdin)]
    print(json.dumps({"done": done}))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(*sys.argv[1:])
