"""Loads the tokenizer of a model folder, from its own files and without code of the folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


def load_tokenizer_files(folder: Path) -> "PreTrainedTokenizerBase":
    """Loads it; without torch where there is a tokenizer.json. Raises `InvalidRequest` naming `model`."""
    try:
        if (folder / "tokenizer.json").exists():
            from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what `tokenizers` raises has no class of its own
        raise InvalidRequest(f"no tokenizer can be loaded from {str(folder)!r}: {error}", field="model") from error
    return tokenizer


def fast_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> "Tokenizer":
    """Returns its implementation in Rust, which any thread may use. It neither truncates nor pads from now on.

    Raises `InvalidRequest` naming `model` for tokenizers in Python, which cannot be decoded piece by piece.
    """
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or not hasattr(fast, "encode_batch_fast"):
        raise InvalidRequest(
            f"a {type(tokenizer).__name__} has no tokenizer.json: save it in the format of `tokenizers`", field="model"
        )
    fast.no_truncation()
    fast.no_padding()
    return fast  # type: ignore[no-any-return]
