"""Learns from heartbeats how fast each worker reads prompts, and says it of those of which nothing is known yet.

Invariant: `_speeds` has attached workers that have read, and `_beats` the last heartbeat of each that was learnt from.
Lost with the process, and of a worker with its session: the fleet's typical speed counts until it has read again.
"""

from collections.abc import Iterable
from statistics import median
from typing import Final

from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.move_costs import COSTS
from ebbtide.scheduling.dispatch.turns.prefill_speed import PrefillSpeed

#: Workers, evenly picked, that stand for a larger fleet where a typical speed is asked for.
_SAMPLE: Final = 64


class PrefillSpeeds:
    def __init__(self) -> None:
        self._speeds: dict[str, PrefillSpeed] = {}
        self._beats: dict[str, HeartbeatReport] = {}
        self.typical = 0.0  # tokens/s of a typical worker; 0.0: no worker's are known

    def learn(self, sessions: Iterable[WorkerSession]) -> None:
        """Learn from the heartbeats of all attached workers. A borrowed one reads when its host lets it: its times show
        no speed.
        """
        steady = {one.session_id: one for one in sessions if not one.borrowed}
        self._speeds = {name: speed for name, speed in self._speeds.items() if name in steady}
        self._beats = {name: self._heard(one) for name, one in steady.items()}
        known = list(self._speeds.values())[:: -(-len(self._speeds) // _SAMPLE) or 1]
        self.typical = median(speed.tokens_per_s for speed in known) if known else 0.0

    def rate(self, session: WorkerSession) -> float:
        """Tokens/s at which the worker reads; a typical one's if its own are not known; 0.0 if no worker's are."""
        speed = self._speeds.get(session.session_id)
        return speed.tokens_per_s if speed else self.typical

    def _heard(self, session: WorkerSession) -> HeartbeatReport:
        beat = session.beat
        last = self._beats.get(session.session_id, beat)
        if beat.prompt_reads > last.prompt_reads:
            assumed = self.typical or COSTS.prefill_tokens_per_s
            speed = self._speeds.setdefault(session.session_id, PrefillSpeed(assumed))
            tokens, seconds = beat.prompt_tokens - last.prompt_tokens, beat.prompt_s - last.prompt_s
            speed.observe(beat.prompt_reads - last.prompt_reads, tokens, seconds)
            session.learn_prefill(speed.tokens_per_s)
        return beat
