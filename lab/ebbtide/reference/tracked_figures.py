"""The page about the figures of trackers, from the tables that name them."""

from collections.abc import Iterator
from typing import Final

from ebbtide.reference.field_tables import cell
from ebbtide.trainer.tracking import Sample, all_figures

_HEAD: Final = """# Figures of trackers

The built-in trainer writes each run's figures into the folder of its output, `OUTPUT/RUN/`:

| file | holds |
|---|---|
| `metrics.jsonl` | a line of JSON for each step and each evaluation, by the names below |
| `samples.jsonl` | a line for some responses of each step, from the worst reward to the best |
| `tensorboard/` | the same for TensorBoard: `tensorboard --logdir OUTPUT` |
| `wandb/` | with `wandb_project`: what Weights & Biases keeps on disk |

Names are those of TRL's `GRPOTrainer` where it has the figure. As its plots do, TensorBoard and Weights & Biases
put `train/` before a name, and `eval/` in place of `eval_`. A figure is missing where the run does not have it. A
value that a trainer of your own reports under another name keeps that name.
[Watch a run](../guides/monitoring.md#trackers) says how to set the trackers.

A line of `metrics.jsonl` also has `kind`, `step` (optimiser steps in the weights), `seconds` since the run's
submission, the event's `cursor`, and `preempted`, the rollouts that were resumed up to it. `kind` is `step`,
`evaluation`, or `resumed`: then the steps after its `step` are trained again, so the last line of a step counts.
"""
_SAMPLES: Final = {
    "step": "optimiser steps in the weights that the sample led to",
    "group": "its group",
    "episode": "its episode",
    "prompt": "the prompt's text, special tokens included; at most 8,000 characters",
    "completion": "the text after it, with what an environment said in between",
    "reward": "the episode's reward",
    "tokens": "sampled tokens",
    "versions": "the versions that sampled them",
}


def page() -> Iterator[str]:
    """Lines of docs/reference/tracked-figures.md."""
    yield from (*_HEAD.splitlines(), "")
    for title, figures in all_figures():
        yield from (
            f"## {title}",
            "",
            "| figure | in TRL | value of the event, or counter | meaning |",
            "|---|---|---|---|",
        )
        for figure in figures:
            source = f"`{figure.source}`" if figure.source else ""
            yield f"| `{figure.name}` | {'yes' if figure.in_trl else ''} | {source} | {cell(figure.meaning)} |"
        yield ""
    yield from ("## Samples", "", "| column | meaning |", "|---|---|")
    yield from (f"| `{name}` | {cell(_SAMPLES[name])} |" for name in Sample.__struct_fields__)
    yield ""
