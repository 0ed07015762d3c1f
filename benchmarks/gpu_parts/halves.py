"""The parts of the two halves of `benchmarks/gpu.py`, with their limits, and the tests that its `checks` runs."""

from typing import Final

from benchmarks.gpu_parts.harness import Half, Part

_LIMIT_S: Final = 600.0

TRAINER: Final = Half(
    name="trainer",
    limit_s=_LIMIT_S,
    parts=(
        Part(
            name="passes",
            work="benchmarks.gpu_parts.learning_parts:passes",
            limit_s=150,
            answers="memory, speed and attention of forward and backward, by shape, type and length",
        ),
        Part(
            name="steps",
            work="benchmarks.gpu_parts.learning_parts:steps",
            limit_s=90,
            answers="the share of elements that a step changes, and a patch's bytes",
        ),
        Part(
            name="publishing",
            work="benchmarks.gpu_parts.publishing_parts:publishing",
            limit_s=140,
            answers="the stages of a version from the trainer to a worker's file of changes",
        ),
        Part(
            name="in_place",
            work="benchmarks.gpu_parts.publishing_parts:in_place",
            limit_s=60,
            answers="the arithmetic of an update in place, and copies from shared memory",
        ),
        Part(
            name="memory",
            work="benchmarks.gpu_parts.learning_parts:memory",
            limit_s=40,
            answers="an optimiser's state off the device and back",
            needs_gpu=True,
        ),
        Part(
            name="checkpoints",
            work="benchmarks.gpu_parts.learning_parts:checkpoints",
            limit_s=50,
            answers="a checkpoint written and read",
        ),
        Part(
            name="cuda_tests",
            work="benchmarks.gpu_parts.learning_parts:cuda_tests",
            limit_s=70,
            answers="the unit tests that use a GPU where there is one",
        ),
    ),
)

ENGINE: Final = Half(
    name="engine",
    limit_s=_LIMIT_S,
    parts=(
        Part(
            name="boot",
            work="benchmarks.gpu_parts.engine_parts:boot",
            limit_s=100,
            answers="seconds of a boot with graphs, and what vLLM chose: runner, attention, scheduling, obstacle",
        ),
        Part(
            name="install",
            work="benchmarks.gpu_parts.engine_parts:install",
            limit_s=130,
            answers="in place, by a reload and by a fresh boot: the same engine, with requests in flight",
        ),
        Part(
            name="tokens",
            work="benchmarks.gpu_parts.token_parts:tokens",
            limit_s=150,
            answers="tokens a second of vLLM, of the engine and of a worker; how late its event loop is",
        ),
        Part(
            name="mismatch",
            work="benchmarks.gpu_parts.engine_parts:mismatch",
            limit_s=70,
            answers="how far engine and trainer are apart on the same tokens",
        ),
        Part(
            name="borrowed",
            work="benchmarks.gpu_parts.lent_parts:borrowed",
            limit_s=90,
            answers="reclaims, cuts of the cache, and sleep of a borrowed engine",
        ),
        Part(
            name="lending",
            work="benchmarks.gpu_parts.lent_parts:lending",
            limit_s=150,
            answers="a trainer and a borrowed engine on one card, which is killed once",
        ),
        Part(
            name="install_8b",
            work="benchmarks.gpu_parts.engine_parts:install_8b",
            limit_s=150,
            answers="pauses at 8B, in place and by a reload",
            needs_gpu=True,
        ),
    ),
)

HALVES: Final = {half.name: half for half in (TRAINER, ENGINE)}
#: All tests that have something to do on a GPU that they cannot do elsewhere, or do otherwise there.
CHECKS: Final = (
    *(f"tests/unit/trainer/learning/test_{name}.py" for name in ("learner", "streamed_gradients", "gpu_changes")),
    *(f"tests/unit/trainer/learning/test_{name}.py" for name in ("learning", "trainer_memory")),
    *(f"tests/e2e/test_vllm_{name}.py" for name in ("install", "engine", "sleep", "borrowed", "kv_budget", "scoring")),
    "tests/e2e/test_vllm_drafts.py",
    "tests/e2e/test_exact_sampling.py",
    "tests/integration/trainer/test_ranks_equal.py",  # two ranks on GPUs, where there are two
)
