"""A gateway before a fleet that knows no gateways: it tells a clear error until the coordinator is replaced. Then older
workers serve it, under a run that the older coordinator stored.
"""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.chaos.cluster import TOKEN, Cluster
from tests.fakes.model_texts import save_chat_model
from tests.fakes.scripted_engine import follow
from tests.fakes.scripted_settings import ScriptedSettings
from tests.support.waiting import wait_until
from tests.upgrade.previous import Previous

#: Ids below it have a text in the tests' tokenizer. Nothing ends a response but its length.
SCRIPT = ScriptedSettings(step_s=0.02, vocab_size=400, mean_length=0)
PROMPT = [5, 6, 7, 8]


async def asked(cluster: Cluster, **further: Any) -> httpx.Response:
    url = f"http://{cluster.process['gateway'].address}/v1/completions"
    body = {"model": "old", "prompt": PROMPT, "max_tokens": 40, "return_token_ids": True, **further}
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(url, json=body, headers={"authorization": f"Bearer {TOKEN}"})


@pytest.mark.timeout(240)
async def test_a_gateway_serves_a_fleet_of_before_gateways_once_its_coordinator_is_replaced(
    cluster: Cluster, before_gateways: Previous, tmp_path: Path
) -> None:
    cluster.environment |= dict.fromkeys(("coordinator", "relay", "w1"), before_gateways.environment)
    cluster.script = SCRIPT
    client = await cluster.boot(workers=1)
    model = save_chat_model(tmp_path / "model")
    spec = {"name": "old", "model": str(model), "environment": {"name": "none"}, "trainer": {"name": "external"}}
    await client.submit(spec, "old-1")
    async with client.claim("old-1") as lease:
        await lease.publish({"w": np.ones((3, 4), "f4")}, step=0)
        coordinator = cluster.process["coordinator"].address
        await cluster.start("gateway", "gateway", listen="127.0.0.1:0", coordinator=coordinator, holder="g")
        refused = await asked(cluster)
        assert refused.status_code == 503
        assert "the coordinator knows no gateways; upgrade it" in refused.json()["error"]["message"]

        cluster.ask_to_end("coordinator")
        await wait_until(lambda: not cluster.process["coordinator"].running(), timeout=60, what="its end")
        del cluster.environment["coordinator"]
        await cluster.coordinator()
        answer = (await asked(cluster)).json()
        expected = [token for token, _ in follow(SCRIPT, PROMPT, 40)]
        assert answer["choices"][0]["token_ids"] == expected
        scored = await asked(cluster, prompt_logprobs=0, max_tokens=1)
        assert scored.status_code == 503
        assert "no attached worker scores prompts" in scored.json()["error"]["message"]
        counters = (await client.run("old-1")).counters
        assert (counters["requests_submitted"], counters.get("submitted", 0)) == (1, 0)
