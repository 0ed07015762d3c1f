"""lm-eval: tasks of its kinds of requests; loglikelihoods are compared with the model's own table."""

import json
import math
import os
from pathlib import Path

import numpy as np
from lm_eval import simple_evaluate
from told import KEY, MODEL, RUN, URL, answer, base, tell, tell_checked, tell_version
from transformers import AutoTokenizer

QUESTIONS = ["the quick", "and the dog", "jumps over the lazy"]
CHOICES = [" dog", " brown fox", " lazy dog sleeps"]
TASK = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path("questions.jsonl").absolute())}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": 0,
    "target_delimiter": "",
}
CHOOSING = {"task": "choices", "output_type": "multiple_choice", "doc_to_choice": CHOICES}
WRITING = {
    "task": "texts",
    "output_type": "generate_until",
    "generation_kwargs": {"max_gen_toks": 24, "until": ["\n\n"]},
}
LOCAL = {"tokenizer": str(MODEL), "tokenizer_backend": "huggingface"}


def samples(model, url, task, **arguments):
    return simple_evaluate(
        model=model,
        model_args={"model": RUN, "base_url": url, "max_retries": 1, **arguments},
        tasks=[TASK | task],
        log_samples=True,
        apply_chat_template=model.endswith("chat-completions"),
    )["samples"][task["task"]]


def texts(found):
    return [answer(one["filtered_resps"][0]) for one in found]


tell_version("lm-eval")
os.environ["OPENAI_API_KEY"] = KEY
Path("questions.jsonl").write_text("".join(json.dumps({"question": one}) + "\n" for one in QUESTIONS))

table, tokenizer = np.load(MODEL / "bigrams.npy"), AutoTokenizer.from_pretrained(MODEL)
found = samples("local-completions", f"{URL}/v1/completions", CHOOSING, **LOCAL)
for sample in found:
    for choice, (given, _) in zip(CHOICES, sample["filtered_resps"], strict=True):
        context = sample["doc"]["question"]
        before, ids = len(tokenizer(context)["input_ids"]), tokenizer(context + choice)["input_ids"]
        truth = float(sum(table[ids[at - 1], ids[at]] for at in range(before, len(ids))))
        if not math.isclose(float(given), truth, abs_tol=1e-3):
            raise RuntimeError(f"error: {context + choice!r} has {truth}, and was told {given}")
tell_checked("loglikelihoods", len(found) * len(CHOICES))

what = "completions until a stop"
tell(what, texts(samples("local-completions", f"{base(what)}/completions", WRITING, **LOCAL)), asked=QUESTIONS)

what = "chats until a stop"
found = samples("local-chat-completions", f"{base(what)}/chat/completions", WRITING, tokenizer_backend=None)
tell(what, texts(found), asked=QUESTIONS)
