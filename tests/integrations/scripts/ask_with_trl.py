"""TRL's client of a vLLM server at a gateway: what it gets, beside what the network itself says.

Its argument is a plan as JSON. The key comes from the netrc file that the variable NETRC names. Prints JSON.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_client import VLLMClient

PLAN = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(PLAN["model"], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(PLAN["model"])
client = VLLMClient(base_url=PLAN["url"], connection_timeout=10)
asked = {"n": 3, "max_tokens": 24, "temperature": 0.7}
prompts = [tokenizer(text)["input_ids"] for text in ("spell", "ab", "x")]


@torch.no_grad()
def scores(prompt, completion):
    """Logits of the whole vocabulary at each token of a completion."""
    return model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]


def gap(answer, n):
    """The largest difference from the network's own logprobs."""
    found = 0.0
    for number, (ids, logprobs) in enumerate(zip(answer["completion_ids"], answer["logprobs"], strict=True)):
        own = (scores(answer["prompt_ids"][number // n], ids) / asked["temperature"]).log_softmax(-1)
        said = torch.tensor([one for (one,) in logprobs])
        found = max(found, (own.gather(1, torch.tensor(ids)[:, None])[:, 0] - said).abs().max().item())
    return found


sampled = client.generate(prompts, **asked)
chats = client.chat([[{"role": "user", "content": text}] for text in ("spell", "ab")], **asked)
greedy = client.generate(prompts, max_tokens=12, temperature=0.0, logprobs=None)
own = [scores(prompt, ids).argmax(-1).tolist() for prompt, ids in zip(prompts, greedy["completion_ids"], strict=True)]
teacher = client.get_sequence_logprobs(
    [prompt + ids for prompt, ids in zip(prompts, greedy["completion_ids"], strict=True)],
    [len(prompt) for prompt in prompts],
    top_logprobs=5,
)
best = scores(prompts[0], greedy["completion_ids"][0]).log_softmax(-1).topk(5)
refused = {}
for what, call in {
    "communicator": lambda: client.init_communicator(device="cpu"),
    "grammar": lambda: client.generate(prompts, structured_outputs_regex="a+"),
    "alternatives": lambda: client.get_sequence_logprobs([prompts[0]], [1], top_logprobs=100),
}.items():
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the client raises nothing narrower
        refused[what] = str(error)
told = {
    "model": client.model,
    "world_size": client.get_world_size(),
    "completions": len(sampled["completion_ids"]),
    "prompts_kept": sampled["prompt_ids"] == prompts,
    "chats": len(chats["completion_ids"]),
    "chat_prompts": [tokenizer.decode(ids) for ids in chats["prompt_ids"]],
    "gap": gap(sampled, asked["n"]),
    "chat_gap": gap(chats, asked["n"]),
    "greedy_is_own": greedy["completion_ids"] == own,
    "teacher_gap": (torch.tensor(teacher["logprobs"][0]) - best.values).abs().max().item(),
    "refused": refused,
}
sys.stdout.write(json.dumps(told) + "\n")
