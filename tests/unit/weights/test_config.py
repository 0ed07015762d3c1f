"""A model's configuration travels with its versions: bound by their root, and never as code."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.types.weights import CONFIG_BYTES, Manifest, PolicyVersion
from ebbtide.weights import (
    ManifestJoiner,
    Signer,
    build_manifest,
    check_config,
    check_signature,
    named_tensor,
    read_config,
    seal_manifest,
    split_manifest,
)

SIGNER = Signer(b"s" * 32)
CONFIG: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64}


def manifest(config: bytes) -> Manifest:
    plain = build_manifest("r", PolicyVersion(policy="p", version=1), [named_tensor("w", np.zeros(4, np.float32))])
    return seal_manifest("r", plain.version, plain.tensors, config=config)


def test_who_knows_of_none_sees_the_version_as_it_ever_was() -> None:
    plain = build_manifest("r", PolicyVersion(policy="p", version=1), [named_tensor("w", np.zeros(4, np.float32))])
    signed = SIGNER.sign(manifest(json.dumps(CONFIG).encode()))
    assert signed.version.root == plain.version.root
    check_signature(msgspec.structs.replace(signed, config=b"", config_signature=b""), SIGNER.public)


@pytest.mark.parametrize(
    "changes", [{"config": b'{"a": 1}'}, {"config_signature": b""}, {"config_signature": b"x" * 64}]
)
def test_one_that_its_publisher_did_not_sign_is_refused(changes: dict[str, bytes]) -> None:
    signed = SIGNER.sign(manifest(json.dumps(CONFIG).encode()))
    check_signature(signed, SIGNER.public)
    with pytest.raises(PermissionDenied):
        check_signature(msgspec.structs.replace(signed, **changes), SIGNER.public)


def test_one_of_another_version_is_refused() -> None:
    signed = SIGNER.sign(manifest(json.dumps(CONFIG).encode()))
    other = SIGNER.sign(seal_manifest("another", signed.version, signed.tensors))
    moved = msgspec.structs.replace(other, config=signed.config, config_signature=signed.config_signature)
    with pytest.raises(PermissionDenied):
        check_signature(moved, SIGNER.public)


def test_it_travels_in_the_first_part() -> None:
    sealed = SIGNER.sign(manifest(json.dumps(CONFIG).encode()))
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
