"""Says what the settings are on which real runs are measured, and which of them a short benchmark takes."""

from typing import Any, Final, Literal

from msgspec import Struct

from benchmarks.simulator.bound_fleet import SLOTS
from benchmarks.simulator.random_policy import ending_tokens
from benchmarks.simulator.random_reward import ENVIRONMENT, RandomRewardParams

#: Steps of a setting. The median of fewer says little.
STEPS: Final = 20
QUICK_STEPS: Final = 10


class Interruption(Struct, frozen=True, kw_only=True):
    """What befalls one worker in a step. Spare workers take the place of those that are gone."""

    kind: Literal["kill", "drain", "join"]
    step: int  # counted from 0
    share: float  # of the time for which the trainer waited in the steps before, on median
    back_s: float = 3.0  # after which the spare worker attaches, where one is gone


class RealSetting(Struct, frozen=True, kw_only=True):
    name: str
    workers: int  # at the begin
    prompts: int = 8  # of a step
    group: int = 4  # samples of each
    prompt_tokens: int = 48  # with the chat template's
    stops: int = 1  # tokens that end a response besides the end token: they set its mean length
    cap: int = 512
    max_staleness: int = 0
    steps: int = STEPS
    interruptions: tuple[Interruption, ...] = ()
    served: bool = False  # the worker borrows its core from an engine that serves users
    slots: int = SLOTS

    @property
    def spares(self) -> int:
        """Workers that must wait frozen when the run begins."""
        return len(self.interruptions)

    def spec(self, model: str, output: str, seed: int) -> dict[str, Any]:
        """Returns the run to submit. It learns next to nothing, so that lengths stay as they are."""
        params = RandomRewardParams(prompt_tokens=self.prompt_tokens)
        return {
            "name": "real",
            "model": model,
            "seed": seed,
            "environment": {"name": ENVIRONMENT, "params": {"prompt_tokens": params.prompt_tokens}},
            "sampling": {"max_tokens": self.cap, "stop_token_ids": list(ending_tokens(self.stops))},
            "batch": {
                "groups_per_step": self.prompts,
                "group_size": self.group,
                "max_staleness": self.max_staleness,
            },
            # A checkpoint at the end alone, where it lengthens no step that is measured.
            "trainer": {"steps": self.steps, "learning_rate": 1e-7, "checkpoint_every": 1_000_000},
            "output": output,
        }


def _every(kind: Literal["kill", "drain"], count: int, shift: int = 0) -> tuple[Interruption, ...]:
    """As many as given, spread over the steps, early in some and late in others.

    The first two steps tell how long the trainer usually waits. Late in a step few rollouts are left to be disturbed.
    """
    shares, first = (0.15, 0.4, 0.25, 0.5), 2
    apart = (STEPS - first) / count
    return tuple(
        Interruption(kind=kind, step=first + int(number * apart), share=shares[(number + shift) % len(shares)])
        for number in range(count)
    )


#: Together they have thirty kills and drains. A kill costs each rollout of its worker what was made since the last
#: flush, which is the same moment for all of them: so the sum over few kills varies by chance alone, and twenty are not
#: too many.
SETTINGS: Final = (
    RealSetting(name="one worker, short responses", workers=1, prompts=16, stops=7, cap=128),
    RealSetting(name="one worker, long responses", workers=1, stops=0, cap=768, prompt_tokens=160),
    RealSetting(name="two workers", workers=2),
    RealSetting(name="three workers, long responses", workers=3, prompts=12, stops=0, cap=768),
    RealSetting(name="kills", workers=3, prompts=12, interruptions=_every("kill", 10)),
    RealSetting(name="kills, long responses", workers=3, stops=0, cap=768, interruptions=_every("kill", 10, shift=1)),
    RealSetting(name="drains", workers=3, prompts=12, interruptions=_every("drain", 10)),
    RealSetting(name="late joiner", workers=1, interruptions=(Interruption(kind="join", step=6, share=0.5),)),
    RealSetting(name="one step ahead", workers=1, max_staleness=1),
    RealSetting(name="borrowed beside users", workers=1, served=True),
)
QUICK: Final = (
    RealSetting(name="two workers", workers=2, steps=QUICK_STEPS),
    RealSetting(
        name="kills and a drain",
        workers=3,
        prompts=12,
        steps=QUICK_STEPS,
        interruptions=(
            Interruption(kind="kill", step=3, share=0.3),
            Interruption(kind="drain", step=5, share=0.3),
            Interruption(kind="kill", step=7, share=0.2),
        ),
    ),
)
