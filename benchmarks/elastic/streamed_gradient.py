"""Measures how far gradients that are summed up group by group are from those of the whole batch.

The live trainer's learner takes the groups of a step in several orders, in parts of one to three groups, on one rank
and on two. It computes in float32 on the CPU. The error is the norm of the difference to the batch's gradient, by that
gradient's norm.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.elastic.elastic_part import PartFindings, PartTerms
from tests.integration.trainer.fixed_training import alone
from tests.integration.trainer.streamed_gradients import ORDERS, gradient, streamed_job, together
from tests.tiny_model import save_tiny_model


def measured(_: PartTerms) -> PartFindings:
    return PartFindings(figures={"streamed_gradient_error": streamed_gradient_error()}, details={"dtype": "float32"})


def streamed_gradient_error() -> float:
    """The largest relative error over all orders and numbers of ranks."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = save_tiny_model(folder / "tiny")
        for order in ORDERS:
            alone(streamed_job(model, folder, "one", order))
        together([streamed_job(model, folder, "two", order) for order in ORDERS], folder)
        batch = gradient(folder, "one-streamed-None", model)
        names = [f"{ranks}-streamed-{order}" for ranks in ("one", "two") for order in ORDERS]
        return max(float((gradient(folder, name, model) - batch).norm() / batch.norm()) for name in names)
