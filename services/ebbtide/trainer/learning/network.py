"""Loads and saves networks and tokenizers as local Hugging Face checkpoints: safetensors, no remote code, no pickle."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from ebbtide.claimed_runs.model_directory import check_model_directory, vocabulary_mismatch
from ebbtide.errors import InvalidRequest
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
    return network.eval()


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
    network: Network, tokenizer: Tokenizer, directory: Path, *, notes: Mapping[str, str] | None = None
) -> None:
    """Writes both as a checkpoint for `transformers` and vLLM, with `notes` (file name -> text) beside them.

    The directory is written under another name, synced and renamed, so that it appears as a whole. It replaces an older
    one of that name.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        network.save_pretrained(beside)
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
