"""Writes the workers' settings for a vLLM engine that is small, exact and on one thread."""


def engine_config(max_model_len: int = 0, *, kv_cache_mib: int = 64, engine_args: str = "") -> str:
    """A worker's configuration file. `max_model_len`: tokens, 0: the model's own; `engine_args`: a JSON object."""
    lines = [
        "[vllm]",
        'dtype = "float32"',
        "enforce_eager = true",
        "threads = 1",
        f"kv_cache_mib = {kv_cache_mib}",
        f"max_model_len = {max_model_len}",
        f"engine_args = '{engine_args}'",
    ]
    return "\n".join(lines) + "\n"
