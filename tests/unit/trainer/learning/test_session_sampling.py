"""A session whose requests are all sampled in ways of their own is trained under the very distributions that it was
sampled from, from the gateway's door to the learner's ratios.
"""

from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from ebbtide.auth.credential_files import ReloadedFiles
from ebbtide.auth.security import TokenCheck
from ebbtide.gateway.access import KeyRing, RequestLimits
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.store.records import pack, unpack
from ebbtide.trainer.base_model.base_model import character_tokenizer
from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.training_batches import samples_of
from ebbtide.trainer.ranks.rank_group import pack_samples, unpack_samples
from ebbtide.types.rollout import FinishReason, TokenChunk, Trajectory
from ebbtide.types.run import EnvironmentSpec, Run, Sampling, TrainerSpec
from ebbtide.types.tokens import pack_tokens, unpack_ids
from ebbtide.v1 import rollouts_pb2
from ebbtide.wire import from_proto, to_proto
from tests.fakes.model_texts import served_model
from tests.fakes.scripted_app_state import scripted_app_state
from tests.fakes.scripted_rollouts import ScriptedCatalog, ScriptedSource, scripted_run

SECRET: Final = "the-shared-secret"
HEADERS: Final = {"authorization": f"Bearer {SECRET}", "x-session-id": "episode", "x-group-id": "problem"}
TURNS: Final = 20
TOKENS: Final = 12
SAMPLED: Final = ("temperature", "top_p", "top_k", "min_p", "min_tokens")


def body(turn: int) -> dict[str, Any]:
    """How a turn is sampled: differently in each of its parameters from all others."""
    return {
        "temperature": 0.6 + 0.05 * turn,
        "top_p": 1.0 - 0.02 * turn,
        "top_k": 0 if turn % 5 == 0 else 80 - 3 * turn,
        "min_p": 0.004 * turn,
        "min_tokens": turn % 4 * 2,
        "max_tokens": TOKENS,
    }


def log_distribution(logits: np.ndarray, sampling: Sampling, barred: list[int]) -> np.ndarray:
    """vLLM's rule in double precision: logits (v,) to logprobs (v,)."""
    scaled = logits.astype(np.float64) / (sampling.temperature or 1e-3)
    scaled[barred] = -np.inf
    likely = np.exp(scaled - scaled.max())
    scaled[likely < sampling.min_p] = -np.inf
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-sampling.top_k]] = -np.inf
    order = np.argsort(scaled, kind="stable")
    probable = np.exp(scaled - scaled.max())
    probable /= probable.sum()
    outside = order[np.cumsum(probable[order]) <= 1 - sampling.top_p]
    scaled[outside] = -np.inf
    return scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())  # type: ignore[no-any-return]


class NetworkSource(ScriptedSource):
    """Samples from a network, each rollout as it asks."""

    def __init__(self, run: Run, model: ServedModel, network: Network) -> None:
        super().__init__(run, model)
        self._network, self._draw = network, np.random.default_rng(3)
        self._made: dict[str, TokenChunk] = {}

    def _chunks(self, rollout_id: str) -> Iterator[TokenChunk]:
        if rollout_id not in self._made:
            self._made[rollout_id] = self._sampled(rollout_id)
        yield self._made[rollout_id]

    def _sampled(self, rollout_id: str) -> TokenChunk:
        asked = self.submitted[rollout_id]
        prompt, made, logprobs = unpack_ids(asked.prompt_ids).tolist(), list[int](), list[float]()
        ends = [*asked.sampling.stop_token_ids, *self.model.eos_ids]
        while len(made) < asked.sampling.max_tokens:
            with torch.no_grad():
                logits = self._network(torch.tensor([[*prompt, *made]])).logits[0, -1].numpy()
            barred = ends if len(made) < asked.sampling.min_tokens else []
            found = log_distribution(logits, asked.sampling, barred)
            made.append(int(self._draw.choice(len(found), p=np.exp(found))))
            logprobs.append(found[made[-1]])
            if made[-1] in ends:
                return TokenChunk(offset=0, tokens=pack_tokens(made, logprobs, 3), reason=FinishReason.STOP)
        return TokenChunk(offset=0, tokens=pack_tokens(made, logprobs, 3), reason=FinishReason.LENGTH)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    made = TemplateSandbox(processes=1)
    yield made
    made.close()


@pytest.fixture
def source(network: Network, sandbox: TemplateSandbox) -> NetworkSource:
    rows = network.config.vocab_size
    model = served_model(character_tokenizer(), sandbox, context=4096, rows=rows)
    run = scripted_run()
    spec = replace(run.spec, environment=EnvironmentSpec(name="agents"))
    return NetworkSource(replace(run, spec=spec), model, network)


@pytest.fixture
async def http(source: NetworkSource) -> AsyncIterator[httpx.AsyncClient]:
    keys = KeyRing(ReloadedFiles((), lambda: TokenCheck(f"Bearer {SECRET}")), None)
    app = make_app(scripted_app_state(ScriptedCatalog([source]), keys, RequestLimits()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=HEADERS) as client:
        yield client


async def play(http: httpx.AsyncClient, turns: int = TURNS) -> None:
    prompt = [5, 6, 7]
    for turn in range(turns):
        sent = {"prompt": prompt, "return_token_ids": True, **body(turn)}
        answer = await http.post("/v1/completions", json=sent)
        assert answer.status_code == 200, answer.text
        prompt += [*answer.json()["choices"][0]["token_ids"], 8 + turn]


def as_the_trainer_gets(made: Trajectory) -> Trajectory:
    """As it comes out of the coordinator and its store."""
    stored = unpack(pack(from_proto(to_proto(made, rollouts_pb2.Trajectory), Trajectory)), Trajectory)
    return from_proto(to_proto(stored, rollouts_pb2.Trajectory), Trajectory)


async def test_a_session_of_turns_with_samplings_of_their_own_trains_to_ratios_of_one(
    http: httpx.AsyncClient, source: NetworkSource, network: Network
) -> None:
    await play(http)
    trace = (await http.get("/v1/sessions/episode")).json()
    for number, turn in enumerate(trace["turns"]):
        assert {name: body(number)[name] for name in SAMPLED}.items() <= (turn["sampling"].items())
    assert (await http.post("/v1/sessions/episode/reward", json={"reward": 1.0})).status_code == 200
    (made,) = source.trajectories
    first = as_the_trainer_gets(made)
    assert first == made
    other = replace(first, episode_id="other", session_id="other", reward=0.0)
    samples = samples_of([first, other], TrainerSpec(), seed=0, step=0)
    assert [len(sample.responses) for sample in samples] == [TURNS, TURNS]
    settings = LearnerSettings(micro_batch_tokens=2048, eos_ids=source.model.eos_ids)
    learner = Learner(network, settings, version=3)
    stats = learner.step(unpack_samples(pack_samples(samples)), Random(0))
    assert stats.tokens == 2 * made.loss_mask.count(1) > 10 * TURNS
    assert stats.logprob_gap is not None
    assert stats.logprob_gap <= 1e-5
    assert stats.importance_weight == pytest.approx(1.0, abs=1e-6)
    assert stats.clip_share == 0.0

    forgotten = [replace(one, responses=()) for one in (first, other)]
    learner = Learner(network, settings, version=3)
    stats = learner.step(samples_of(forgotten, TrainerSpec(), seed=0, step=0), Random(0))
    assert (stats.logprob_gap or 0.0) > 0.1, "the run's own sampling is another"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"temperature": 0}, "temperature"),
        ({"temperature": 0.001}, "temperature"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ],
)
async def test_what_cannot_be_computed_again_is_refused_by_name_at_its_first_turn(
    http: httpx.AsyncClient, source: NetworkSource, asked: dict[str, Any], field: str
) -> None:
    await play(http, turns=1)
    sent = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 4, **asked}
    refused = await http.post("/v1/chat/completions", json=sent)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert [len(turns) for _, turns in source.stored.values()] == [1]
    if field in ("temperature", "repetition_penalty"):  # a trainer of one's own may make of it what it can
        spec = replace(source.run.spec, trainer=TrainerSpec(name="external"))
        source.run = replace(source.run, spec=spec)
        assert (await http.post("/v1/chat/completions", json=sent)).status_code == 200
