"""Answers what clients ask of runs: which there are, and how a text is encoded."""

from typing import Any

import msgspec

from ebbtide.gateway.dialects.anthropic import MessagesDialect
from ebbtide.gateway.dialects.tokenize import TOKENIZE_FIELDS, TokenizeBody, tokenized_prompt
from ebbtide.gateway.http.route import AppState, JsonCall
from ebbtide.gateway.request_player import encode_prompt
from ebbtide.gateway.runs import ServedRun
from ebbtide.types.parse import parse
from ebbtide.types.run import Run


class RunRoutes:
    """The work of these routes."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    async def models(self, call: JsonCall) -> dict[str, Any]:
        """GET /v1/models: the live runs that the key is for."""
        runs = await self._state.directory.visible(call.key)
        return {"object": "list", "data": [await self._model(run) for run in runs]}

    async def model(self, call: JsonCall) -> dict[str, Any]:
        """GET /v1/models/{model}."""
        served = await self._state.directory.find(call.key, call.path["model"])
        return await self._model(served.run)

    async def _model(self, run: Run) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": run.run_id,
            "object": "model",
            "created": 0,
            "owned_by": "ebbtide",
            "root": run.spec.model,
            "parent": None,
            "max_model_len": await self._state.directory.context(run),
        }
        return card | ({"weight_version": run.newest.version} if run.newest else {})

    async def tokenize(self, call: JsonCall) -> dict[str, Any]:
        """POST /tokenize."""
        asked = parse(TokenizeBody, TOKENIZE_FIELDS.checked(call.body))
        served = await self._state.directory.find(call.key, asked.model)
        model = served.player.model
        prompt = tokenized_prompt(asked)

        def work() -> tuple[list[int], list[str] | None]:
            ids = encode_prompt(prompt, model)
            served.player.check_length(ids, "prompt" if asked.messages is None else "messages")
            return ids, [model.token_text(token) for token in ids] if asked.return_token_strs else None

        ids, texts = await served.player.threads.run(call.key.owner, work)
        return {"count": len(ids), "max_model_len": model.context, "tokens": ids, "token_strs": texts}

    async def count_tokens(self, call: JsonCall) -> dict[str, Any]:
        """POST /v1/messages/count_tokens."""
        limits = self._state.limits
        dialect = MessagesDialect(max_messages=limits.messages, max_tools=limits.tools)
        request = dialect.read({"max_tokens": 1, **call.body}).request
        served = await self._state.directory.find(call.key, request.model)
        player, prompt = served.player, request.prompts[0]
        ids = await player.threads.run(call.key.owner, lambda: encode_prompt(prompt, player.model))
        return {"input_tokens": len(ids)}

    async def server_info(self, call: JsonCall) -> dict[str, Any]:
        """GET /server_info: what the run serves, and under `vllm_config` what TRL asks vLLM: there is no adapter, and
        no engine that takes weights of its clients."""
        run = (await self._run(call)).run
        version = run.newest.version if run.newest else 0
        engine = {
            "lora_config": None,
            "parallel_config": {"data_parallel_size": 1},
            "weight_transfer_config": None,
        }
        return {"run_id": run.run_id, "model": run.spec.model, "weight_version": version, "vllm_config": engine}

    async def world_size(self, call: JsonCall) -> dict[str, Any]:
        """GET /get_world_size: the workers that are to serve the run."""
        served = await self._run(call)
        share = (await served.lease.refreshed()).share
        return {"world_size": share.workers if share else 0}

    async def usage(self, call: JsonCall) -> dict[str, Any]:
        """GET /v1/usage: the key's limits, and what keys of its name have used."""
        key = call.key.metered
        if key is None:
            return {"object": "usage", "limits": None}
        served = await self._run(call)
        used = msgspec.to_builtins(await served.lease.key_usage(key.owner))
        return {"object": "usage", "run_id": served.run.run_id, "limits": msgspec.to_builtins(key.limits), **used}

    async def _run(self, call: JsonCall) -> ServedRun:
        return await self._state.directory.find(call.key, call.query.get("model", ""))
