"""What `EbbtideRollouts` needs of a `GRPOTrainer`, without TRL."""

from types import SimpleNamespace
from typing import Any

import torch


class TokenIds:
    """A tokenizer of texts that are token ids with spaces between them."""

    def __call__(self, *, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(word) for word in one.split()] for one in text]}

    def apply_chat_template(self, *, conversation: list[Any], **options: Any) -> dict[str, list[list[int]]]:
        assert options["add_generation_prompt"]
        assert options["tokenize"]
        return self(text=[" ".join(message["content"] for message in messages) for messages in conversation])


class ScriptedTrainer:
    """Is on the main process, the only one."""

    def __init__(self, *, length: int = 48, group_size: int = 4, model: str = "scripted") -> None:
        self.accelerator = SimpleNamespace(
            num_processes=1, process_index=0, is_main_process=True, get_state_dict=lambda module: module.state_dict()
        )
        network: Any = torch.nn.Linear(4, 4)
        network.config = SimpleNamespace(name_or_path=model)
        self.model = network
        self.model_wrapped = self.model
        self.args = SimpleNamespace(
            temperature=0.9,
            top_p=0.8,
            top_k=0,
            min_p=None,
            repetition_penalty=1.0,
            max_completion_length=length,
            generation_kwargs=None,
            learning_rate=1e-3,
            use_vllm=False,
        )
        self.state = SimpleNamespace(global_step=0, max_steps=4, log_history=list[dict[str, float]]())
        self.num_generations, self.num_generations_eval = group_size, 2
        self.eos_token_ids = [1]
        self.processing_class = TokenIds()
        self.tools: list[Any] = []
        self.environment_factories: dict[Any, Any] | None = None
        self.chat_template, self.chat_template_kwargs = None, dict[str, Any]()
        self.use_vllm = False

    def step(self, reward: float = 0.5) -> None:
        """An optimiser step: other weights, and a line in the log."""
        with torch.no_grad():
            self.model.weight += 1
        self.state.global_step += 1
        self.state.log_history.append({"step": self.state.global_step, "reward": reward, "loss": float("nan")})
