"""An environment of verifiers: in each of several turns the policy is asked for letters from a to h.

Its harness runs in the environment's own process. The answer to a turn depends on what the policy said before.
"""

import httpx
import verifiers.v1 as vf

__all__ = ["LettersHarness", "LettersTaskset"]
LETTERS = frozenset("abcdefgh")
TURNS = 3


def share(text: str) -> float:
    return sum(one in LETTERS for one in text) / len(text) if text else 0.0


class LettersTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        said = [message.content or "" for message in trace.assistant_messages]
        return sum(map(share, said)) / TURNS

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class LettersTaskset(vf.Taskset[LettersTask]):
    def load(self):
        for number in range(16):
            yield LettersTask(vf.TaskData(prompt=f"write {number:x}"), self.config.task)


class LettersHarnessConfig(vf.HarnessConfig):
    pass


class LettersHarness(vf.Harness[LettersHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=300.0) as client:
            for _ in range(TURNS):
                answer = await client.post("/chat/completions", json={"model": ctx.model, "messages": messages})
                answer.raise_for_status()
                said = answer.json()["choices"][0]["message"]
                messages.append({"role": "assistant", "content": said.get("content") or ""})
                messages.append({"role": "user", "content": "more" if share(messages[-1]["content"]) else "letters"})
        return vf.ProgramResult(0, "", "")
