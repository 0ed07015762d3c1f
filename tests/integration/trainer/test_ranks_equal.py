"""Two ranks compute what one does: the same losses and weights, from each other's checkpoints too, and publish the same
file."""

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.relay_client import RelayClient
from ebbtide.client.service_peer import ServicePeer
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning.network import load_network, load_tokenizer, save_network
from ebbtide.trainer.training_checkpoint import CheckpointError
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights import Signer
from tests.integration.client.reader import Reader
from tests.integration.trainer.conftest import TOKEN, Program
from tests.integration.trainer.fixed_training import RUN, SEED, Held, Job, alone, make_spec, weights
from tests.integration.trainer.streamed_gradients import ORDERS, Told, gradient, streamed_job, together
from tests.integration.weight_relay.signed_relay import SignedRelay

#: Of the sums of rounding errors in float32, over ten steps.
TOLERANCE = 1e-4
#: Of the norm of the difference to that of the gradient, in float32, where groups are streamed.
GRADIENT_TOLERANCE = 1e-5
log = logging.getLogger(__name__)  # what was measured: --log-cli-level=info


class Trained(NamedTuple):
    """`one` rank from the model to step 15; `two`, likewise; `two-from-one`'s checkpoint of step 5; `one-from-two`'s.
    Their checkpoints lie in folders of these names."""

    folder: Path
    told: dict[str, Told]
    relay: str


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("relay")
    program = Program("weight_relay", folder, "--data-dir", str(folder / "relay"), listens=True)
    program.start()
    yield program.address
    program.end()


def tied_model(model: Path, folder: Path) -> Path:
    """The model with one tensor for embedding and head."""
    network, tokenizer = load_network(model), load_tokenizer(model)
    network.config.tie_word_embeddings = True
    network.tie_weights()
    save_network(network, tokenizer, folder / "tied")
    return folder / "tied"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, relay: str) -> Trained:
    folder, spec = tmp_path_factory.mktemp("trained"), make_spec(tiny_model)

    def at(name: str, step: int = 5) -> Path:
        return folder / name / f"step-{step:06d}"

    def job(name: str, source: str = "") -> Job:
        steps, saves = ((5, 15), (15,)) if source else ((0, 15), (5, 10, 15))
        origin = str(at(source)) if source else ""
        return Job(spec=spec, folder=str(folder / name), steps=steps, saves=saves, checkpoint=origin)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    told = {"one": alone(job("one"))}
    last = msgspec.structs.replace(job("two-from-one", "one"), relay=relay, run="ranks")
    low = [make_spec(tiny_model, dtype="bfloat16"), make_spec(tied_model(tiny_model, folder))]
    more = [
        Job(spec=one, folder=str(folder / f"two-{name}"), steps=(0, 10), saves=(10,))
        for one, name in zip(low, ("low", "tied"), strict=True)
    ]
    away = [
        msgspec.structs.replace(job("two-offloaded"), steps=(0, 10), saves=(10,), offload=True),
        msgspec.structs.replace(job("two-offloaded-from-one", "one"), offload=True),
        msgspec.structs.replace(job("two-parked"), steps=(0, 10), saves=(10,), parks=True),
        msgspec.structs.replace(job("two-parked-from-two", "two"), parks=True),
    ]
    named = (
        "two",
        "two-low",
        "two-tied",
        *(one.folder.rpartition("/")[2] for one in away),
        *(f"two-streamed-{order}" for order in ORDERS),
        "two-from-one",
    )
    streamed = [streamed_job(tiny_model, folder, "two", order) for order in ORDERS]
    told |= zip(named, together([job("two"), *more, *away, *streamed, last], folder), strict=True)
    for order in ORDERS:
        told[f"one-streamed-{order}"] = alone(streamed_job(tiny_model, folder, "one", order))
    for one in more:
        name = Path(one.folder).name.replace("two", "one")
        told[name] = alone(msgspec.structs.replace(one, folder=str(folder / name)))
    told["one-from-two"] = alone(job("one-from-two", "two"))
    torch.set_num_threads(threads)
    return Trained(folder, told, relay)


def gaps(ours: Path, theirs: Path) -> dict[str, float]:
    """Of each weight: the relative L2 distance."""
    mine, other = weights(ours), weights(theirs)
    assert mine.keys() == other.keys()
    return {name: float((one - other[name]).norm() / other[name].norm()) for name, one in mine.items()}


def worst(ours: Told, theirs: Told, name: str) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(abs(one[name] - other[name]) / max(abs(other[name]), 1e-8) for one, other in pairs)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ours", "theirs", "first"),
    [
        ("two", "one", 0),
        ("two-from-one", "one", 5),
        ("one-from-two", "two", 5),
        ("two-offloaded", "one", 0),
        ("two-offloaded-from-one", "one", 5),
    ],
)
def test_ten_steps_give_the_same_losses_and_weights(ours: str, theirs: str, first: int, trained: Trained) -> None:
    """From the model, and from a checkpoint that the other layout wrote; with moments in host memory, too."""
    own = trained.told[ours][:10]
    other = trained.told[theirs][first : first + 10]
    assert len(own) == len(other) == 10
    step = f"step-{first + 10:06d}"
    distances = gaps(trained.folder / ours / step, trained.folder / theirs / step)
    shown = {name: worst(own, other, name) for name in ("loss", "grad_norm", "kl")}
    log.info("%s against %s: %s, weights %s", ours, theirs, shown, max(distances.values()))
    for name in ("loss", "grad_norm", "entropy", "kl", "logprob_gap", "importance_weight"):
        assert worst(own, other, name) < TOLERANCE, name
    for name in ("tokens", "stale_tokens", "learning_rate", "taught", "trained", "reward"):
        assert [one[name] for one in own] == [one[name] for one in other], name
    assert max(distances.values()) < TOLERANCE
    moved = gaps(trained.folder / ours / step, trained.folder / theirs / "step-000005")
    assert all(distance > 100 * distances[name] for name, distance in moved.items())


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "step"), [("two-parked", 10), ("two-parked-from-two", 15)])
def test_ranks_whose_states_leave_their_devices_after_each_step_compute_the_same_to_the_last_bit(
    name: str, step: int, trained: Trained
) -> None:
    folder = f"step-{step:06d}"
    ours, theirs = weights(trained.folder / name / folder), weights(trained.folder / "two" / folder)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[key]) for key, one in ours.items())
    assert trained.told[name] == trained.told["two"][step - 10 : step]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("what", "tolerance"), [("tied", TOLERANCE), ("low", 0.1)])
def test_so_do_tied_weights_and_bfloat16_within_its_rounding(what: str, tolerance: float, trained: Trained) -> None:
    """In bfloat16 ranks compute on other paddings, and norms with rounded weights."""
    own, other = trained.told[f"two-{what}"], trained.told[f"one-{what}"]
    step = "step-000010"
    distances = gaps(trained.folder / f"two-{what}" / step, trained.folder / f"one-{what}" / step)
    shown = {name: worst(own, other, name) for name in ("loss", "grad_norm")}
    log.info("%s: %s, weights %s", what, shown, max(distances.values()))
    assert worst(own, other, "loss") < tolerance
    assert worst(own, other, "grad_norm") < tolerance
    assert max(distances.values()) < tolerance


@pytest.mark.timeout(400)
def test_streamed_gradients_equal_those_of_the_batch_on_one_rank_and_on_two(trained: Trained, tiny_model: Path) -> None:
    batch, errors = gradient(trained.folder, "one-streamed-None", tiny_model), dict[str, float]()
    for name in (f"{ranks}-streamed-{order}" for ranks in ("one", "two") for order in ORDERS):
        errors[name] = float((gradient(trained.folder, name, tiny_model) - batch).norm() / batch.norm())
        for value in ("loss", "grad_norm", "entropy", "logprob_gap", "importance_weight", "tokens", "taught"):
            assert worst(trained.told[name], trained.told["one-streamed-None"], value) < TOLERANCE, (name, value)
    log.info("relative error of streamed gradients: %s", errors)
    assert max(errors.values()) <= GRADIENT_TOLERANCE
    assert errors["one-streamed-None"] == 0.0
    assert min(errors[f"two-streamed-{order}"] for order in ORDERS) > 0.0, "two ranks sum in another order"


@pytest.mark.timeout(400)
async def test_two_ranks_publish_the_file_that_one_process_publishes(trained: Trained) -> None:
    expected = weights(trained.folder / "two-from-one" / "step-000015")
    peer = ServicePeer("weight-relay", trained.relay, ClientSecurity(token=TOKEN), patience_s=5.0)
    version = PolicyVersion(policy="policy", version=1, step=15)
    await SignedRelay(peer).publish("process", version, expected)
    files = []
    for run, key in (("ranks", Signer(SEED).public), ("process", b"")):
        reader = Reader(peer, run, key)
        found = await reader.read(1)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert reader._mirror is not None
        files.append(await asyncio.to_thread(Path(reader._mirror.path).read_bytes))
        pieces = [entry for entry in reader.manifest.tensors if not entry.whole]
        assert bool(pieces) == (run == "ranks"), "each rank publishes its own shards"
        reader.close()
    await peer.close()
    assert files[0] == files[1]


@pytest.mark.timeout(400)
async def test_ranks_hold_no_weights_and_no_group_of_the_runs_before_whether_published_or_failed(
    relay: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The last run's are there: rank 0 alone is told when it is over."""
    spec, bad = make_spec(tiny_model), make_spec(tmp_path / "no-such-directory")
    runs = [
        Job(spec=spec, folder="", steps=(0, 0), saves=(), relay=relay, run=f"begun-{number}") for number in range(3)
    ]
    failing = Job(spec=bad, folder="", steps=(0, 0), saves=(), fails=True)
    assert await asyncio.to_thread(together, [*runs[:2], failing, failing, runs[2]], tmp_path) == [[], [], []]
    peer = ServicePeer("weight-relay", relay, ClientSecurity(token=TOKEN), patience_s=5.0)
    for run in runs:
        state = await RelayClient(peer).describe(run.run)
        assert [one.info.version.version for one in state.versions] == [1]
    await peer.close()
    first, second = (msgspec.json.decode((tmp_path / f"jobs.held{rank}").read_bytes(), type=Held) for rank in range(2))
    assert first == Held(groups=3, publishers=0, snapshots=0)  # torch's own, the orders', the run's
    assert second == Held(groups=3, publishers=1, snapshots=2)


@pytest.mark.timeout(400)
def test_what_two_ranks_wrote_loads_with_transformers_and_holds_no_pickle(trained: Trained) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = trained.folder / "two" / "step-000015"
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    expected = weights(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(path).eos_token_id == 2
    own, other = (json.loads((trained.folder / one / path.name / "config.json").read_text()) for one in ("one", "two"))
    assert own == other
    assert len(list(path.glob("model-*-of-00002.safetensors"))) == 2
    assert len(list((path / "trainer" / "optimizer").iterdir())) == 2
    assert {file.suffix for file in path.rglob("*") if file.is_file()} <= {".json", ".safetensors", ".jinja"}


@pytest.mark.timeout(400)
def test_a_checkpoint_that_lacks_a_part_or_is_damaged_is_refused_by_name(trained: Trained, tmp_path: Path) -> None:
    for number, damage in enumerate(("gone", "cut", "garbage", "layout")):
        broken = tmp_path / damage
        shutil.copytree(trained.folder / "two" / "step-000005", broken)
        part = sorted((broken / "trainer" / "optimizer").iterdir())[number % 2]
        match damage:
            case "gone":
                part.unlink()
            case "cut":
                part.write_bytes(part.read_bytes()[:-100])
            case "garbage":
                part.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
            case "layout":
                part.write_bytes(part.read_bytes().replace(b"saved_offsets", b"saved_nothing"))
        with pytest.raises(CheckpointError, match="is damaged"):
            training_checkpoint.read_state(broken, run_id=RUN)


@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks on GPUs need two CUDA devices")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_compute_what_one_does(dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    spec = make_spec(tiny_model, dtype=dtype)
    jobs = [
        Job(spec=spec, folder=str(tmp_path / name), steps=(0, 10), saves=(10,), device="cuda")
        for name in ("one", "two")
    ]
    own, other = alone(jobs[0]), together(jobs[1:], tmp_path)[0]
    tolerance = 1e-3 if dtype == "float32" else 5e-2  # sums in another order, and not on the same kernels
    assert worst(own, other, "loss") < tolerance
    assert max(gaps(tmp_path / "two" / "step-000010", tmp_path / "one" / "step-000010").values()) < tolerance
