"""Keeps the former path of vLLM's plugin."""

from ebbtide.former_paths import warn_moved
from ebbtide.rollout_worker.engine.vllm.vllm_plugin import register

__all__ = ["register"]

warn_moved(__name__, "ebbtide.rollout_worker.engine.vllm.vllm_plugin")
