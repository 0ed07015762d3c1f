"""What lies in the store outlives upgrades: bytes that are compared stay the same while nothing new is used."""

import hashlib
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from ebbtide.store import records
from ebbtide.store.records import ALWAYS, body_digest, json_record, pack, unpack
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec, Sampling
from ebbtide.types.weights import PolicyVersion

REQUEST = RolloutRequest(rollout_id="a", group_id="g", episode_id="e", prompt_ids=b"\1\0\0\0", sampling=Sampling())
SPEC = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e", params={"z": [1, {"y": 2, "b": 3}], "a": 1}))
REMEDY = "what is in stores has other bytes now: append new fields at the end, with defaults, and leave `ALWAYS` alone"


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    share: float = 1.0
    floor: float = 0.0


class LaterSampling(Sampling, frozen=True, kw_only=True):
    min_p: float = 0.0


class LaterRequest(RolloutRequest, frozen=True, kw_only=True):
    sampling: Sampling
    tags: tuple[str, ...] = ()
    weights: Weights = Weights()


class LaterSpec(RunSpec, frozen=True, kw_only=True):
    weights: Weights = Weights()


@pytest.fixture(autouse=True)
def later() -> Any:
    """Records as they may be some releases on."""
    grown = {LaterSpec: ALWAYS[RunSpec], LaterRequest: ALWAYS[RolloutRequest], LaterSampling: ALWAYS[Sampling]}
    with patch.dict(records.ALWAYS, grown):
        yield
    records._shape.cache_clear()


def as_later(record: msgspec.Struct, kind: Any, **more: Any) -> Any:
    return kind(**{name: getattr(record, name) for name in record.__struct_fields__} | more)


def test_what_stores_hold_has_the_same_bytes_now() -> None:
    assert body_digest(REQUEST).hex() == "17e90c185b755f56ca4fa1abfe948011", REMEDY
    plain = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e"))
    for data, digest in (
        (json_record(plain), "b64b0583033252250c4d6bbfc8ae74ef851ceb4480a85a5f18f6fca215639c82"),
        (
            pack(PolicyVersion(policy="p", version=1)),
            "2095620dc2a83ff8de71137f406449660bbcca1c6dc90e057b04df58c62b748d",
        ),
    ):
        assert hashlib.sha256(data).hexdigest() == digest, REMEDY


def test_what_is_asked_again_after_an_upgrade_is_the_same() -> None:
    assert json_record(as_later(SPEC, LaterSpec)) == json_record(SPEC)
    sampling = as_later(Sampling(), LaterSampling)
    grown = as_later(REQUEST, LaterRequest, sampling=sampling)
    assert pack(grown) == pack(REQUEST)
    assert body_digest(grown) == body_digest(REQUEST)


def test_older_code_reads_what_does_not_use_anything_newer() -> None:
    """Specs refuse keys that they do not know."""
    assert msgspec.json.decode(json_record(as_later(SPEC, LaterSpec)), type=RunSpec) == SPEC
    used = as_later(SPEC, LaterSpec, weights=Weights(share=2.0))
    with pytest.raises(msgspec.ValidationError, match="weights"):
        msgspec.json.decode(json_record(used), type=RunSpec)
    assert msgspec.json.decode(json_record(used), type=LaterSpec) == used


def test_what_is_newer_counts_where_it_is_used() -> None:
    grown = as_later(REQUEST, LaterRequest)
    for more in ({"tags": ("x",)}, {"weights": Weights(floor=0.5)}):
        other = msgspec.structs.replace(grown, **more)
        assert body_digest(other) != body_digest(grown)
        assert unpack(pack(other), LaterRequest) == other


def test_order_of_parameters_does_not_make_another_spec() -> None:
    turned = EnvironmentSpec(name="e", params={"a": 1, "z": [1, {"b": 3, "y": 2}]})
    for kind in (RunSpec, LaterSpec):
        one, other = as_later(SPEC, kind), as_later(SPEC, kind, environment=turned)
        assert json_record(one) == json_record(other)


def test_the_number_of_fields_that_are_left_out_changes_no_byte() -> None:
    """Beyond 15 fields msgpack has another head."""
    names = [f"later_{number}" for number in range(40)]
    grown = msgspec.defstruct("Grown", [(name, int, 0) for name in names], bases=(PolicyVersion,), kw_only=True)
    with patch.dict(records.ALWAYS, {grown: ALWAYS[PolicyVersion]}):
        assert pack(grown(policy="p", version=1)) == pack(PolicyVersion(policy="p", version=1))
