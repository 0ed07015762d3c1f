"""A model's configuration travels with its versions: bound by their root, and never as code."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.types.weights import CONFIG_BYTES, Manifest, PolicyVersion
from ebbtide.weights import (
    ManifestJoiner,
    build_manifest,
    check_config,
    check_manifest,
    named_tensor,
    read_config,
    seal_manifest,
    split_manifest,
)

CONFIG: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64}


def manifest(config: bytes) -> Manifest:
    plain = build_manifest("r", PolicyVersion(policy="p", version=1), [named_tensor("w", np.zeros(4, np.float32))])
    return seal_manifest("r", plain.version, plain.tensors, config=config)


def test_a_version_without_one_has_the_root_that_it_always_had() -> None:
    plain = build_manifest("r", PolicyVersion(policy="p", version=1), [named_tensor("w", np.zeros(4, np.float32))])
    assert manifest(b"").version.root == plain.version.root
    assert manifest(json.dumps(CONFIG).encode()).version.root != plain.version.root


def test_one_that_was_altered_on_its_way_is_refused() -> None:
    sealed = manifest(json.dumps(CONFIG).encode())
    altered = msgspec.structs.replace(sealed, config=sealed.config.replace(b"64", b"65"))
    with pytest.raises(ChunkCorrupt):
        check_manifest(altered)
    with pytest.raises(ChunkCorrupt):
        check_manifest(msgspec.structs.replace(sealed, config=b""))


def test_it_travels_in_the_first_part() -> None:
    sealed = manifest(json.dumps(CONFIG).encode())
    joiner = ManifestJoiner()
    for part in split_manifest(sealed, part_bytes=1):
        joiner.add(part)
    assert joiner.join() == sealed


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"auto_map": {"AutoModel": "code.Model"}}, "config.auto_map"),
        ({"text_config": {"auto_map": {}}}, "config.text_config.auto_map"),
        ({"parts": [{"trust_remote_code": True}]}, "config.parts.trust_remote_code"),
        ({"architectures": []}, "config.architectures"),
        ({"architectures": ["os; rm"]}, "config.architectures"),
        ({"model_type": 3}, "config.model_type"),
        ({"model_type": "../up"}, "config.model_type"),
    ],
)
def test_code_and_names_that_are_none_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_config(json.dumps(CONFIG | changes).encode())
    assert refused.value.field == field


@pytest.mark.parametrize(
    "config", [b"{", b"[]", b"\xff", b"[" * 50_000, b'{"a":' * 50 + b"1" + b"}" * 50, b" " * (CONFIG_BYTES + 1)]
)
def test_what_is_no_configuration_is_refused(config: bytes) -> None:
    with pytest.raises(InvalidRequest):
        check_config(config)


def test_a_checkpoints_has_the_end_tokens_of_its_generation(tmp_path: Path) -> None:
    assert read_config(tmp_path) == b""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert check_config(read_config(tmp_path))["eos_token_id"] == [5, 7]
