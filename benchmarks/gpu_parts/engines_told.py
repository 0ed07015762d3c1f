"""Loaded into the processes of an engine, to say what vLLM chose there."""

from typing import Any

from ebbtide.rollout_worker.engine.vllm.tile_transfer import WorkerExtension


class TellingExtension(WorkerExtension):
    """Ebbtide's extension of vLLM's worker, and one call more."""

    def ebbtide_chosen(self) -> dict[str, Any]:
        """The model runner (V1 or V2) and the attention backends of this process."""
        runner, config = self.model_runner, self.vllm_config  # type: ignore[attr-defined]
        layers = config.compilation_config.static_forward_context.values()
        backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
        module = type(runner).__module__
        return {"runner": f"{module}.{type(runner).__name__}", "attention": sorted(backends)}
