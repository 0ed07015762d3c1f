"""Fixtures for all tests: a redis-server process, flushed for each test that asks for it, a folder of grants, and a
tiny checkpoint."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.testing import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A process, never a client: clients belong to the event loop of one test."""
    directory: Path = tmp_path_factory.mktemp("redis")
    server = EmbeddedRedis(directory)
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of an empty store."""
    assert redis_server.command("FLUSHALL") == b"+OK\r\n"
    return redis_server.url


@pytest.fixture
def grant_dir() -> Iterator[Path]:
    """Where a guard and its workers meet: ours alone, and short, as a socket's path has to be."""
    with tempfile.TemporaryDirectory(prefix="ebb-") as made:
        path = Path(made) / "g"
        path.mkdir(0o700)
        yield path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 30 thousand parameters with the character tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ebbtide.trainer.characters import character_tokenizer
    from ebbtide.trainer.network import save_network

    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_network(Qwen3ForCausalLM(config), tokenizer, directory)
    return directory
