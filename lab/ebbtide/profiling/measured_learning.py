"""Records what the learner's steps were measured to take, and what they computed."""

from msgspec import Struct


class LearnerWork(Struct, frozen=True, kw_only=True):
    """What one learner computed in a measured time."""

    seconds: float
    updates: int  # optimiser steps
    micro_batches: int
    tokens: int  # padded
    pairs: float  # of a padded token and one of those before it in its row
    forwards: int = 0  # further forwards of each sample, without a backward


class TrainerMeasurements(Struct, frozen=True, kw_only=True):
    """One trainer, measured."""

    device: str  # name of the GPU; empty: a CPU
    work: tuple[LearnerWork, ...]
    start_s: float  # until its network is loaded
    snapshot_s: float  # to copy all weights
    encode_s: float  # to find and encode what a step changed
    checkpoint_s: float
    weights_bytes: int
    patch_bytes: int
    micro_batch_tokens: int
