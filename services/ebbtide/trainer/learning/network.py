"""Loads and saves networks and tokenizers as local Hugging Face checkpoints: safetensors, no remote code, no pickle."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from ebbtide.errors import InvalidRequest
from ebbtide.run_client import check_model_directory, vocabulary_mismatch
from ebbtide.runtime import fsync

#: A causal language model of `transformers`, and a tokenizer; the library is untyped.
Network = Any
Tokenizer = Any

disable_progress_bar()  # the terminal shows the run's progress


def load_network(directory: Path) -> Network:
    """Loads the network in `directory` in evaluation mode (no dropout), in float32.

    Raises `InvalidRequest` naming `model` if it is no whole checkpoint, or does not fit its tokenizer.
    """
    check_model_directory(directory)
    try:
        network, report = AutoModelForCausalLM.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise InvalidRequest(f"{str(directory)!r} cannot be loaded: {error}", field="model") from error
    if missing := sorted(report["missing_keys"]):
        raise InvalidRequest(f"weights are missing: {', '.join(missing[:3])} ({len(missing)} in all)", field="model")
    check_vocabulary(directory, network)
    make_savable(network)
    return network.eval()


def checkpoint_layers(network: Network) -> bool:
    """Lets activations of layers be computed again in the backward pass. Returns whether the network's layers can.

    `transformers` does that for layers in training mode. Only the layers' own flag is set: attention, dropout and
    routers inside them stay in evaluation mode. What a layer itself drops is set to 0.
    """
    layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not network.supports_gradient_checkpointing:
        return False
    # Without dropout no random number is drawn, so no generator's state needs to be kept.
    network.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in layers:
        layer.training = True
        dropped = [name for name, value in vars(layer).items() if "drop" in name and isinstance(value, float)]
        for name in dropped:
            setattr(layer, name, 0.0)
    return True


def make_savable(network: Network) -> None:
    """Mends a generation configuration that `transformers` loads with a warning, and refuses to save."""
    config = network.generation_config
    if config is None or _is_valid(config):
        return
    config.do_sample = True  # what samples is set, and sampling was not
    if not _is_valid(config):
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        network.generation_config = GenerationConfig(**{name: getattr(config, name) for name in names})


def _is_valid(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def check_vocabulary(directory: Path, network: Network) -> None:
    """Raises `InvalidRequest` naming `model` unless each of the tokenizer's ids has a row in the embedding."""
    rows = network.get_input_embeddings().num_embeddings
    highest = max(load_tokenizer(directory).get_vocab().values(), default=-1)
    if highest >= rows:
        raise vocabulary_mismatch(highest, rows)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Loads the tokenizer in `directory`. Raises `InvalidRequest` naming `model`."""
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(f"the tokenizer in {str(directory)!r} cannot be loaded: {error}", field="model") from error


def save_network(
    network: Network,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    notes: Mapping[str, str] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes both as a checkpoint for `transformers` and vLLM, with `notes` (file name -> text) beside them. `weights`:
    the network's state, if not as it is now.

    The directory is written under another name, synced and renamed, so that it appears as a whole. It replaces an older
    one of that name.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        network.save_pretrained(beside, state_dict=None if weights is None else dict(weights))
        tokenizer.save_pretrained(beside)
        for name, text in (notes or {}).items():
            (beside / name).write_text(text, encoding="utf-8")
        for path in [*beside.rglob("*"), beside]:
            path.chmod(0o755 if path.is_dir() else 0o644)  # workers may run as another user
            fsync(path)
        if directory.exists():
            aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
            directory.rename(aside / directory.name)
            beside.rename(directory)
            shutil.rmtree(aside)
        else:
            beside.rename(directory)
        fsync(directory.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
