"""Makes a small model that half masters a task, for machines that cannot download one.

Supervision on the train split teaches a Qwen3 network with a character tokenizer until its sampled accuracy on the
check split reaches a target; the eval split stays unseen. A share of the characters in demonstrations is mistyped, so
that the model also errs: reinforcement then teaches which of its responses are right.

The tokenizer is for networks too small for words: printable ASCII, newline, and chat markers.
"""

import json
import string
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, Final

import numpy as np
import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ebbtide.environments import EnvironmentSource, ExampleSource, Message
from ebbtide.errors import InvalidRequest
from ebbtide.trainer.base_model.base_model_plan import RECORD, BaseModelPlan, base_model_path, inputs, is_made
from ebbtide.trainer.learning.network import Network, Tokenizer, save_network
from ebbtide.trainer.learning.training_batches import TrainingSample, collate

PAD, UNKNOWN, END, USER, ASSISTANT = "<|pad|>", "<|unknown|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, UNKNOWN, END, USER, ASSISTANT)
CHARACTERS = "\n" + "".join(sorted(string.ascii_letters + string.digits + string.punctuation + " "))
#: A turn is its marker and its text; an end token, which the policy samples itself, closes an assistant's turn. Calls
#: of tools are written as vLLM's parser `pythonic` reads them. The tools of a request are not described: a network this
#: small knows its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}{{ message.content }}"
    "{% if message.tool_calls %}[{% for call in message.tool_calls %}{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]{% endif %}"
    "{{ '<|end|>' if message.role == 'assistant' else '' }}"
    "{% endfor %}{{ '<|assistant|>' if add_generation_prompt else '' }}"
)


def character_tokenizer() -> Any:
    """Makes a fast tokenizer with a token per character, which `AutoTokenizer` loads; others become unknown."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


#: Number of the first prompt to learn from, far from those of a run, which count from 0.
FIRST_PROMPT: Final = 1 << 40


@dataclass(frozen=True)
class BaseModelProgress:
    """Progress after a step."""

    step: int
    loss: float  # nats per character
    accuracy: float  # newest sampled one; 0 before the first check
    seconds: float


def make_base_model(
    directory: Path,
    source: EnvironmentSource,
    *,
    seed: int,
    plan: BaseModelPlan | None = None,
    progress: Callable[[BaseModelProgress], None] = lambda _: None,
) -> Path:
    """Returns the checkpoint for these inputs below `directory`, made unless it exists.

    Deterministic for one machine and number of threads, which the caller sets. Raises `InvalidRequest` if `source` has
    no answers to learn from, or the target is not reached in `max_steps`.
    """
    plan = plan or BaseModelPlan()
    if not isinstance(source, ExampleSource):
        text = "this environment has no examples to learn from; give a checkpoint"
        raise InvalidRequest(text, field="environment.name")
    path = base_model_path(directory, source, seed, plan)
    if is_made(path):
        return path
    tokenizer = character_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = new_network(plan, tokenizer)
        end = _Supervision(network, tokenizer, source, plan, seed).run(progress)
    record = json.dumps({**inputs(source, seed, plan), **asdict(end)}, indent=2)
    save_network(network.eval(), tokenizer, path, notes={RECORD: record})
    return path


def sampled_accuracy(
    network: Network, tokenizer: Tokenizer, source: ExampleSource, *, prompts: int, seed: int
) -> float:
    """Share of right answers to the check split's first `prompts` prompts, sampled at temperature 1."""
    examples = [source.example("check", index) for index in range(prompts)]
    texts = [_prompt(tokenizer, messages) for messages, _ in examples]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        output = network.generate(
            input_ids=encoded.input_ids,
            attention_mask=encoded.attention_mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(len(answer) for _, answer in examples) + 4,
        )
    responses = tokenizer.batch_decode(output[:, encoded.input_ids.shape[1] :], skip_special_tokens=True)
    infos = [source.make("check", index).step(response).info for index, response in enumerate(responses)]
    return sum(info["right"] for info in infos) / sum(info["asked"] for info in infos)


class _Supervision:
    """Runs the supervised training of one base model."""

    def __init__(
        self, network: Network, tokenizer: Tokenizer, source: ExampleSource, plan: BaseModelPlan, seed: int
    ) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._source = source
        self._plan = plan
        self._seed = seed
        self._errors = Random(f"{seed}/errors")
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=plan.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )

    def run(self, progress: Callable[[BaseModelProgress], None]) -> BaseModelProgress:
        plan, begun, accuracy = self._plan, time.monotonic(), 0.0
        for step in range(1, plan.max_steps + 1):
            loss = self._step(step, plan.learning_rate * min(1.0, step / plan.warmup_steps))
            if step % plan.check_every == 0:
                accuracy = sampled_accuracy(
                    self._network, self._tokenizer, self._source, prompts=plan.check_prompts, seed=self._seed + step
                )
            now = BaseModelProgress(step, loss, accuracy, time.monotonic() - begun)
            progress(now)
            if accuracy >= plan.target_accuracy:
                return now
        raise InvalidRequest(
            f"the base model reached {accuracy:.2f} in {plan.max_steps} steps; allow more, or ask for less",
            field="target_accuracy",
        )

    def _step(self, step: int, learning_rate: float) -> float:
        samples = [self._sample(FIRST_PROMPT + (step - 1) * self._plan.batch + row) for row in range(self._plan.batch)]
        batch = collate(samples, pad_id=self._tokenizer.pad_token_id)
        loss = torch.nn.functional.cross_entropy(batch.logits(self._network), batch.targets)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()

    def _sample(self, index: int) -> TrainingSample:
        messages, answer = self._source.example("train", index)
        typed = "".join(self._errors.choice(ascii_lowercase) if self._slips(letter) else letter for letter in answer)
        prompt = self._tokenizer.encode(_prompt(self._tokenizer, messages), add_special_tokens=False)
        answer_ids = [*self._tokenizer.encode(typed, add_special_tokens=False), self._tokenizer.eos_token_id]
        count = len(answer_ids)
        return TrainingSample(
            ids=np.array([*prompt, *answer_ids], dtype=np.int64),
            mask=np.ones(count, dtype=np.bool_),
            logprobs=np.zeros(count, dtype=np.float32),
            versions=np.zeros(count, dtype=np.int64),
            advantage=0.0,
        )

    def _slips(self, letter: str) -> bool:
        return letter.isalnum() and self._errors.random() < self._plan.error_rate


def _prompt(tokenizer: Tokenizer, messages: list[Message]) -> str:
    rendered: str = tokenizer.apply_chat_template(
        [message.as_dict() for message in messages], tokenize=False, add_generation_prompt=True
    )
    return rendered


def new_network(plan: BaseModelPlan, tokenizer: Tokenizer) -> Network:
    """Makes the plan's network, in float32 with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=plan.hidden_size,
        intermediate_size=plan.feed_forward_size,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        max_position_embeddings=plan.context,
        # Untied: with so few characters, a separate output layer learns faster.
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float()
