"""Makes the policy of the real settings: the demo's network with random weights, so that lengths of responses spread.

Of `VOCABULARY` tokens each is about as likely as any other at any time. So the number of a response's tokens has a
geometric distribution, with a mean of `VOCABULARY / (1 + n)` if `n` tokens besides the end token end it.
"""

from pathlib import Path
from typing import Final

VOCABULARY: Final = 256
CONTEXT: Final = 1024


def make_random_policy(path: Path, seed: int) -> Path:
    """Writes the checkpoint to `path`. The same seed gives the same bytes."""
    import torch

    from ebbtide.trainer.base_model.base_model import character_tokenizer, new_network
    from ebbtide.trainer.base_model.base_model_plan import BaseModelPlan
    from ebbtide.trainer.learning.network import save_network

    tokenizer = character_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(VOCABULARY - len(tokenizer))])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = new_network(BaseModelPlan(context=CONTEXT), tokenizer)
    save_network(network.eval(), tokenizer, path)
    return path


def ending_tokens(count: int) -> tuple[int, ...]:
    """Returns so many tokens to be given as `sampling.stop_token_ids`: the last ones, which no prompt has."""
    return tuple(range(VOCABULARY - count, VOCABULARY))
