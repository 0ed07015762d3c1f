"""Says what to do where a model's directory is not there."""

import re
from typing import Final

#: OWNER/NAME, as the Hugging Face Hub calls models. A relative path may look the same.
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def no_directory(model: str) -> str:
    """What is wrong with a `model` that is no directory here, and the remedy."""
    told = f"{model[:200]!r} is no directory; give the path of a local checkpoint"
    if not _HUB_NAME.fullmatch(model):
        return told
    folder = f"models/{model.partition('/')[2]}"
    return f"{told}. From the Hugging Face Hub: hf download {model} --local-dir {folder}, then give {folder}"
