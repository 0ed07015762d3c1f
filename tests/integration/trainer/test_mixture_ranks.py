"""Ranks that share a mixture hold their own experts alone, and write and publish the files of one process."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.service_peer import ServicePeer
from ebbtide.trainer.learning.network import load_tokenizer, save_network
from ebbtide.trainer.ranks import sharding
from ebbtide.weights import Signer
from tests.integration.client.reader import Reader
from tests.integration.trainer.conftest import TOKEN, Program
from tests.integration.trainer.fixed_training import SEED, Job, alone, make_spec, weights
from tests.integration.trainer.streamed_gradients import together
from tests.integration.trainer.test_ranks_equal import TOLERANCE, gaps
from tests.unit.trainer.learning.test_checkpoint_tensors import mixture


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("relay")
    program = Program("weight_relay", folder, "--data-dir", str(folder / "relay"), listens=True)
    program.start()
    yield program.address
    program.end()


@pytest.mark.timeout(400)
async def test_two_ranks_train_a_mixture_as_one_does_and_publish_its_files(
    relay: str, tiny_model: Path, tmp_path: Path
) -> None:
    save_network(mixture("qwen3_moe"), load_tokenizer(tiny_model), tmp_path / "mixture")
    assert sharding._blank(tmp_path / "mixture") is not None, "no rank needs the whole model"
    spec, threads = make_spec(tmp_path / "mixture"), torch.get_num_threads()
    torch.set_num_threads(1)

    def job(name: str) -> Job:
        return Job(spec=spec, folder=str(tmp_path / name), steps=(0, 4), saves=(2, 4))

    told = alone(job("one"))
    source = str(tmp_path / "one" / "step-000002")
    later = msgspec.structs.replace(job("later"), steps=(2, 4), saves=(4,), checkpoint=source, relay=relay, run="ranks")
    both, last = together([job("two"), later], tmp_path)
    torch.set_num_threads(threads)
    for ours, theirs in ((both, told), (last, told[2:])):
        for one, other in zip(ours, theirs, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=TOLERANCE, abs=1e-7)
    for name in ("two", "later"):
        distances = gaps(tmp_path / name / "step-000004", tmp_path / "one" / "step-000004")
        assert max(distances.values()) < TOLERANCE
    expected = weights(tmp_path / "later" / "step-000004")
    assert any(".experts.3.gate_proj.weight" in name for name in expected)
    peer = ServicePeer("weight-relay", relay, ClientSecurity(token=TOKEN), patience_s=5.0)
    reader = Reader(peer, "ranks", Signer(SEED).public)
    found = await reader.read(1)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    reader.close()
    await peer.close()
