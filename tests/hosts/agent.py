"""`python -m tests.hosts.agent URL RUN TOKEN_ID...`: an agent with the plain `openai` client, whose key is in the
environment. It streams a completion of a prompt of token ids, and writes the ids of each chunk as a line of JSON."""

import json
import sys
from typing import Any, Final

import openai

#: At the pace of the scripted workers, five seconds: longer than it takes to pull a cable.
TOKENS: Final = 200


def main(url: str, run_id: str, prompt: list[int]) -> None:
    asked: dict[str, Any] = {"model": run_id, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
    with openai.OpenAI(base_url=f"{url}/v1", max_retries=0) as client:
        exact = {"ignore_eos": True, "return_token_ids": True}
        for chunk in client.completions.create(**asked, extra_body=exact):
            ids = [token for choice in chunk.model_dump()["choices"] for token in choice.get("token_ids") or []]
            print(json.dumps(ids), flush=True)  # noqa: T201 - who started this reads it


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(word) for word in sys.argv[3:]])
