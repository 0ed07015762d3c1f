"""vllm bench serve: random prompts to completions and chats, whose streams it times."""

import json
import os
import subprocess
import sys
from pathlib import Path

from told import KEY, MODEL, RUN, answer, base, tell, tell_version

PROMPTS, TOKENS_IN, TOKENS_OUT = 8, 40, 24


def bench(what, backend, endpoint):
    out = Path(f"{backend}.json")
    flags = {
        "--backend": backend,
        "--base-url": base(what, ""),
        "--endpoint": endpoint,
        "--model": RUN,
        "--tokenizer": str(MODEL),
        "--dataset-name": "random",
        "--random-input-len": TOKENS_IN,
        "--random-output-len": TOKENS_OUT,
        "--num-prompts": PROMPTS,
        "--ready-check-timeout-sec": 0,
        "--result-dir": ".",
        "--result-filename": str(out),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--save-result", "--save-detailed"]
    subprocess.run(
        [*command, *(str(word) for pair in flags.items() for word in pair)],
        check=True,
        env=os.environ | {"OPENAI_API_KEY": KEY},
    )
    found = json.loads(out.read_text())
    if found["completed"] != PROMPTS:
        raise RuntimeError(f"error: {found['completed']} of {PROMPTS} completed: {found['errors']}")
    pairs = zip(found["generated_texts"], found["output_lens"], strict=True)
    tell(what, [answer(text, (), None, tokens) for text, tokens in pairs], asked=())


tell_version("vllm")
bench("completions, streamed", "openai", "/v1/completions")
bench("chats, streamed", "openai-chat", "/v1/chat/completions")
