"""What vLLM's own loaders do with checkpoints, and what an update makes of them, as JSON on stdout: in a process of its
own, whose engines run within it.

Argument: a directory to write checkpoints to.
"""

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CONFIGURE_LOGGING="0")

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model

from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.rollout_worker.engine.vllm import vllm_plugin
from ebbtide.rollout_worker.engine.vllm.in_place_update import LoaderMap, TornUpdate, moved, observe, write_in_place
from ebbtide.rollout_worker.engine.vllm.tile_transfer import entries
from ebbtide.rollout_worker.engine.vllm.version_updates import together
from tests.e2e.exact_changes import write_changes

Facts = dict[str, Any]
PROMPT = {"prompt_token_ids": [20, 21, 22, 23]}
GREEDY = SamplingParams(temperature=0, max_tokens=16, detokenize=False, logprobs=0, ignore_eos=True)


def make_experts(path: Path, seed: int) -> Path:
    """A Qwen3 whose layers have four experts each."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        eos_token_id=127,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(path)
    return path


def make_fused(path: Path, seed: int) -> Path:
    """A Phi-3, whose checkpoints have queries, keys and values in one tensor, and gate and up in another."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(seed)
    config = Phi3Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=127,
        pad_token_id=0,
    )
    Phi3ForCausalLM(config).float().save_pretrained(path)
    return path


def boot(path: Path, **changes: Any) -> LLM:
    arguments: Facts = {
        "dtype": "float32",
        "max_model_len": 128,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 32 << 20,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "weight_transfer_config": {"backend": vllm_plugin.BACKEND},
        "worker_extension_cls": vllm_plugin.EXTENSION,
    }
    llm = LLM(str(path), **(arguments | changes))
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    return llm


def ask(llm: LLM) -> Facts:
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    logprobs = [next(iter(one.values())).logprob for one in output.outputs[0].logprobs]
    return {"ids": list(output.outputs[0].token_ids), "logprobs": logprobs}


def install(llm: LLM, path: Path, changes: Path | None = None) -> None:
    files = {"weights": str(path), "changes": str(changes) if changes else None}
    llm.collective_rpc("ebbtide", args=("open_files",), kwargs=files)
    while any(llm.collective_rpc("ebbtide", args=("touch",))):
        pass
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"in_place": changes is not None}})
    llm.collective_rpc("finish_weight_update")


def updated(first: Path, second: Path, **changes: Any) -> Facts:
    """An engine that goes to the second checkpoint and back, and one booted from the second."""
    llm = boot(first, **changes)
    ((boxes, obstacle),) = llm.collective_rpc("ebbtide", args=("report",))
    facts: Facts = {"boxes": boxes, "obstacle": obstacle, "base": ask(llm)}
    for name, path in (("updated", second), ("back", first)):
        install(llm, path / "model.safetensors")
        facts[name] = ask(llm)
    facts["fresh"] = ask(boot(second, **changes))
    return facts


@contextmanager
def rank_of(kind: str, rank: int, size: int) -> Iterator[None]:
    """As if this process were that rank of a group, for what asks for no more than its place in it."""
    place = SimpleNamespace(rank_in_group=rank, world_size=size, is_first_rank=not rank, is_last_rank=rank == size - 1)
    before = getattr(parallel_state, kind)
    setattr(parallel_state, kind, place)
    try:
        yield
    finally:
        setattr(parallel_state, kind, before)


def load(llm: LLM, path: Path, kind: str, rank: int, size: int) -> Any:
    """The model of one rank as a GPU has it: loaded, and nothing packed."""
    config = copy.copy(llm.llm_engine.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    with rank_of(kind, rank, size), set_current_vllm_config(config):
        model = initialize_model(config)
        model.load_weights(load_file(path / "model.safetensors").items())
    return model


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in model.named_parameters()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def sharded(llm: LLM, first: Path, second: Path, kind: str, size: int = 2) -> Facts:
    """What each rank of a group reads, and whether changes in place make it what a load of the second makes it."""
    changes = write_changes(first, second, first / "changes")
    facts: Facts = {"boxes": [], "moved": [], "equal": [], "differed": []}
    seen: list[LoaderMap] = []
    for rank in range(size):
        model, wanted = (load(llm, path, kind, rank, size) for path in (first, second))
        seen.append(observe(model, entries(first)))
        facts["boxes"].append(seen[-1].boxes)
        facts["moved"].append(moved(model, seen[-1], first))
        facts["differed"].append(not equal(weights_of(model), weights_of(wanted)))
        assert not write_in_place(model, changes, entries(first), frozenset())
        facts["equal"].append(equal(weights_of(model), weights_of(wanted)))
    facts["union"] = together([one.boxes for one in seen])
    return facts


def faults(llm: LLM, first: Path, second: Path) -> Facts:
    """What becomes of changes that vLLM refuses, and of a model that keeps its weights in another order.

    `instead`: the answer of an engine that had a whole version beside such changes; `wanted`: of one booted from it.
    """
    facts: Facts = {}
    model = load(llm, first, "_TP", 0, 1)
    before, seen = weights_of(model), observe(model, entries(first))
    changes = load_file(write_changes(first, second, first / "changes"))
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(changes | {f"{name}.values": changes[f"{name}.values"] * float("nan")}, first / "nan")
    facts["refused"] = write_in_place(model, first / "nan", entries(first), frozenset())
    facts["refused_touched_nothing"] = equal(weights_of(model), before)
    install(llm, second / "model.safetensors", first / "nan")
    facts["instead"] = ask(llm)
    unknown = {"model.nothing.indices": torch.tensor([0]), "model.nothing.values": torch.ones(1)}
    save_file(unknown, first / "unknown")
    odd = entries(first) | {"model.nothing": (torch.float32, torch.Size([4]))}
    try:
        write_in_place(model, first / "unknown", odd, frozenset())
    except TornUpdate as error:
        facts["torn"] = str(error)
    fused = model.model.layers[0].mlp.gate_up_proj.weight
    fused.data = fused.data.roll(len(fused) // 2, 0)
    facts["swapped"] = moved(model, seen, first)
    return facts


def main(directory: str) -> None:
    root = Path(directory)
    vllm_plugin.register()
    dense = make_checkpoint(root / "dense1", 1), make_checkpoint(root / "dense2", 2)
    tied = make_checkpoint(root / "tied1", 1, tied=True), make_checkpoint(root / "tied2", 2, tied=True)
    experts = make_experts(root / "experts1", 1), make_experts(root / "experts2", 2)
    # Experts first: vLLM makes its groups of ranks for the first model, and others need fewer.
    facts: Facts = {"experts_sharded": sharded(boot(experts[0]), *experts, "_TP")}
    facts["experts"] = updated(*experts)
    facts["experts_bf16"] = updated(*experts, dtype="bfloat16")
    fused = make_fused(root / "fused1", 1), make_fused(root / "fused2", 2)
    facts["fused_in_checkpoint"] = sharded(boot(fused[0]), *fused, "_TP")
    facts["tied"] = updated(*tied)
    facts["int8"] = updated(*dense, dtype="bfloat16", quantization="int8_per_channel_weight_only")
    facts["fp8"] = updated(*dense, dtype="bfloat16", quantization="fp8_per_channel")
    llm = boot(dense[0])
    facts["tensor_parallel"] = sharded(llm, *dense, "_TP")
    facts["pipeline_parallel"] = sharded(llm, *dense, "_PP")
    facts["faults"] = faults(llm, *dense) | {"wanted": ask(boot(dense[1]))}
    print(json.dumps(facts))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(sys.argv[1])
