"""How much memory a step of the built-in trainer takes, computed: `python -m benchmarks.trainer_memory`.

The learner itself takes two steps on fake tensors, which have shapes and no values (`FakeTensorMode` of torch), as rank
0 of a group whose collectives do nothing. A tracker adds up the storages that are alive. Attention is not run: its
memory is that of FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2). A small model that takes the same steps on
real tensors says how far the tracker is off: its peak is that of the process's resident memory.

What a GPU takes beside tensors is not in these figures: a CUDA context and NCCL's buffers (1 to 2 GB), and fragments of
the allocator. The tracker runs where torch takes the CPU's ways, so kernels' own scratch memory is left out as well.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.arguments import ROOT, output, result
from benchmarks.conditions import conditions

GB: Final = 1e9


class Case(NamedTuple):
    name: str
    model: str
    ranks: int
    tokens: int  # of a micro-batch: one sample
    offload: bool = False
    limit_gb: float = 0.0  # what it must stay below; 0: nothing is asked
    dtype: str = "bfloat16"


MODELS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-0.6B": {"hidden": 1024, "layers": 28, "heads": 16, "inner": 3072, "tied": True},
    "Qwen3-1.7B": {"hidden": 2048, "layers": 28, "heads": 16, "inner": 6144, "tied": True},
    "Qwen3-4B": {"hidden": 2560, "layers": 36, "heads": 32, "inner": 9728, "tied": True},
    "Qwen3-8B": {"hidden": 4096, "layers": 36, "heads": 32, "inner": 12288, "tied": False},
    "Qwen3-32B": {"hidden": 5120, "layers": 64, "heads": 64, "inner": 25600, "tied": False},
    "small": {
        "hidden": 512,
        "layers": 8,
        "heads": 8,
        "kv": 4,
        "head": 64,
        "inner": 1536,
        "vocab": 32000,
        "tied": False,
    },
}
CASES: Final = (
    Case("0.6B on one", "Qwen3-0.6B", 1, 16384),
    Case("1.7B on one", "Qwen3-1.7B", 1, 16384, limit_gb=48),
    Case("4B on one, offloaded", "Qwen3-4B", 1, 8192, offload=True),
    Case("8B on eight", "Qwen3-8B", 8, 16384, limit_gb=45),
    Case("32B on eight, offloaded", "Qwen3-32B", 8, 8192, offload=True, limit_gb=62),
)
#: Computed and measured here.
REAL: Final = (
    Case("small, bfloat16", "small", 1, 2048),
    Case("small, float32", "small", 1, 2048, dtype="float32"),
    Case("small, longer", "small", 1, 4096),
)
PROMPT: Final = 512
TIMEOUT_S: Final = 570


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of storages made under it, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.host = 0
        self._sizes: dict[int, int] = {}
        self._hosted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, torch.distributed.tensor.DTensor) for one in types):
            return NotImplemented  # its operations on local tensors come here
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - a value is asked for
            return 0.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.index.Tensor and _is_mask(args[1]):
            return self.noted(torch.empty_like(args[0]))  # as if all were chosen
        if func is torch.ops.aten.bincount.default:  # its size depends on values beyond `minlength`
            return self.noted(torch.empty(args[2], dtype=torch.int64, device=args[0].device))
        return self.noted(func(*args, **(kwargs or {})))

    def noted(self, made: Any) -> Any:
        for one in tree_iter(made):
            if isinstance(one, Tensor):
                self._note(one.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = _identity(storage), storage.nbytes()
        if key in self._hosted:
            return
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self._add(size - self._sizes.get(key, 0))
        self._sizes[key] = size

    def resized(self, storage: torch.UntypedStorage) -> None:
        if _identity(storage) in self._sizes:
            self._note(storage)

    def to_host(self, tensor: Tensor) -> None:
        """Counts the tensor's storage as the host's."""
        key = _identity(tensor.untyped_storage())
        self._add(-self._sizes[key])
        self.host += self._sizes[key]
        self._sizes[key] = 0
        self._hosted.add(key)

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._hosted.discard(key)


def _identity(storage: torch.UntypedStorage) -> int:
    found: int = storage._cdata  # noqa: SLF001 - its Python object may be made anew
    return found


def _is_mask(indices: Sequence[Any]) -> bool:
    return len(indices) == 1 and indices[0].dtype is torch.bool


@contextmanager
def resizing(tracker: Tracker) -> Iterator[None]:
    """Tells the tracker of storages that are resized: FSDP frees gathered weights in this way."""
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        found = before(storage, size)
        tracker.resized(storage)
        return found

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]


class Attention(torch.autograd.Function):
    """The memory of FlashAttention-2 for queries (b, a, t, d), and keys and values (b, k, t, d); no values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        delta, of_query = torch.empty_like(sums), torch.empty_like(query, dtype=torch.float32)
        wide = query.shape[1] // key.shape[1]  # gradients of keys and values are made for each query head, then summed
        each = [torch.empty_like(query) for _ in range(2 if wide > 1 else 0)]
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta, of_query, each
        return found


def attention(query: Tensor, key: Tensor, value: Tensor, *_args: Any, **kwargs: Any) -> Tensor:
    """Stands for `scaled_dot_product_attention`. Raises `ValueError` for a mask, which would take another kernel."""
    if kwargs.get("attn_mask") is not None:
        raise ValueError("attention has a mask of all pairs of tokens")
    found: Tensor = Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return found


def config_of(model: str) -> Any:
    from transformers import Qwen3Config

    shape = MODELS[model]
    return Qwen3Config(
        vocab_size=shape.get("vocab", 151936),
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape.get("kv", 8),
        head_dim=shape.get("head", 128),
        tie_word_embeddings=shape["tied"],
        max_position_embeddings=40960,
    )


class FakeRanks:
    """Rank 0 of ranks that do nothing."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def add_up(self, values: Sequence[float]) -> list[float]:
        return list(values)


def samples(case: Case) -> list[Any]:
    """Two micro-batches for each rank: the second finds gradients of the first."""
    from ebbtide.trainer.learning.training_batches import TrainingSample

    sampled = case.tokens - PROMPT
    one = TrainingSample(
        ids=np.ones(case.tokens, dtype=np.int64),
        mask=np.ones(sampled, dtype=np.bool_),
        logprobs=np.zeros(sampled, dtype=np.float32),
        versions=np.zeros(sampled, dtype=np.int64),
        advantage=1.0,
    )
    return [one] * (2 * case.ranks)


def learner_of(case: Case, network: Any, ranks: Any) -> Any:
    from ebbtide.trainer.learning.learner import Learner, LearnerSettings

    settings = LearnerSettings(micro_batch_tokens=case.tokens, offload=case.offload, dtype=case.dtype)
    return Learner(network, settings, version=0, ranks=ranks)


def computed(case: Case) -> dict[str, float]:
    """Bytes of a step on fake tensors."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM, masking_utils

    from ebbtide.trainer.learning import optimizer
    from ebbtide.trainer.learning.network import checkpoint_layers
    from ebbtide.trainer.ranks.sharding import shard

    tracker, there = Tracker(), optimizer.to_host

    def away(tensor: Tensor, *, locked: bool = False) -> Tensor:
        found = there(tensor, locked=locked)
        tracker.to_host(optimizer.own_part(found))
        return found

    optimizer.to_host = away
    torch.nn.functional.scaled_dot_product_attention = attention
    masking_utils.is_tracing = lambda *_: False  # as if tensors had values: no mask is made where none is needed
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if case.ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    mesh = init_device_mesh("cpu", (case.ranks,)) if case.ranks > 1 else None
    with resizing(tracker), mode, tracker:
        network = AutoModelForCausalLM.from_config(config_of(case.model), dtype=torch.float32)
        parameters = sum(one.numel() for one in network.parameters())
        if mesh is not None:
            shard(network, mesh, dtype=case.dtype)
        checkpoint_layers(network.eval())
        gc.collect()
        weights = tracker.live
        learner = learner_of(case, network, FakeRanks(case.ranks) if case.ranks > 1 else None)
        learner.step(samples(case), Random(0))
        tracker.peak = 0
        learner.step(samples(case), Random(0))
        kept = tracker.live
    return {
        "parameters": parameters,
        "weights_bytes": weights,
        "state_bytes": kept,
        "peak_bytes": tracker.peak,
        "host_bytes": tracker.host,
    }


def estimated(case: Case) -> dict[str, float]:
    """What the trainer's own estimate says, which the check at submit goes by."""
    from ebbtide.trainer.memory_estimate import MemoryPlan, ModelShape, estimate

    config = config_of(case.model)
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    attended = (config.num_attention_heads + 2 * config.num_key_value_heads) * width
    projections = hidden * (attended + config.num_attention_heads * width + 3 * inner)
    layer = projections + 2 * hidden + 2 * width
    edge = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2) + hidden
    shape = ModelShape(
        parameters=config.num_hidden_layers * layer + edge,
        layers=config.num_hidden_layers,
        layer=layer,
        edge=edge,
        vocabulary=config.vocab_size,
        hidden=hidden,
        attended=attended,
        inner=inner,
    )
    plan = MemoryPlan(
        ranks=case.ranks,
        micro_batch_tokens=case.tokens,
        longest=case.tokens,
        low=case.dtype == "bfloat16",
        offload=case.offload,
    )
    found = estimate(shape, plan)
    return {"estimated_parameters": shape.parameters, "estimated_bytes": found.device}


def real(case: Case) -> dict[str, float]:
    """Bytes of a step on real tensors: how much the process's resident memory rises from before the model."""
    from transformers import AutoModelForCausalLM

    from ebbtide.trainer.learning.network import checkpoint_layers

    torch.set_num_threads(1)
    warm = AutoModelForCausalLM.from_config(config_of("small"), dtype=torch.float32).eval()
    learner_of(case._replace(tokens=PROMPT + 64), warm, None).step(
        samples(case._replace(tokens=PROMPT + 64)), Random(0)
    )
    del warm
    gc.collect()
    before = resident("VmRSS")
    network = AutoModelForCausalLM.from_config(config_of(case.model), dtype=torch.float32).eval()
    checkpoint_layers(network)
    learner = learner_of(case, network, None)
    learner.step(samples(case), Random(0))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    learner.step(samples(case), Random(0))
    return {"peak_bytes": resident("VmHWM") - before}


def resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")


def apart(what: str, case: Case) -> dict[str, float]:
    """Runs a case in a process of its own, whose memory and process group end with it."""
    command = [sys.executable, "-m", "benchmarks.trainer_memory", f"--{what}", json.dumps(case)]
    # Large blocks go back to the system as soon as they are freed, so that resident memory follows tensors.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(cases: Sequence[Case], against: Sequence[Case], out: Path) -> None:
    """Runs the cases and writes what was found so far after each."""
    rows, errors = list[dict[str, Any]](), list[dict[str, Any]]()
    found = {"conditions": conditions(), "torch": torch.__version__, "cases": rows, "against_real_peaks": errors}
    for case in cases:
        rows.append(row(case, apart("computed", case)))
        print(rows[-1]["said"], flush=True)
        out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    for case in against:
        errors.append(error(case, apart("computed", case)["peak_bytes"], apart("real", case)["peak_bytes"]))
        print(errors[-1]["said"], flush=True)
        out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def row(case: Case, found: dict[str, float]) -> dict[str, Any]:
    found |= estimated(case)
    peak, guess, host = (found[name] / GB for name in ("peak_bytes", "estimated_bytes", "host_bytes"))
    said = f"{case.name}, {case.tokens} tokens: {peak:.1f} GB, host {host:.1f}, estimate {guess:.1f}"
    return {**case._asdict(), **found, "holds": not case.limit_gb or peak <= case.limit_gb, "said": said}


def error(case: Case, ours: float, theirs: float) -> dict[str, Any]:
    off = ours / theirs - 1
    said = f"{case.name}: computed {ours / GB:.2f} GB, measured {theirs / GB:.2f} GB, {off:+.1%}"
    return {**case._asdict(), "computed_bytes": ours, "measured_bytes": theirs, "error": round(off, 4), "said": said}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=output, help="file of the results")
    parser.add_argument("--only", default="", help="text that the names of cases contain")
    parser.add_argument("--computed", help=argparse.SUPPRESS)
    parser.add_argument("--real", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for how, text in ((computed, options.computed), (real, options.real)):
        if text:
            print(json.dumps(how(Case(*json.loads(text)))))
            return
    cases, against = ([one for one in named if options.only in one.name] for named in (CASES, REAL))
    report(cases, against, options.out or result("trainer_memory", quick=bool(options.only)))


if __name__ == "__main__":
    main()
