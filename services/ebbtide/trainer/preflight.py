"""`python -m ebbtide.trainer.preflight SPEC.json`: would this run's environment and model do, before it is submitted?

A process of its own, so that the command line, which may be installed without the trainer, need not import it. Exit
status 0: they would; 2: they would not, with {"field", "message"} as JSON on stdout; 3: the trainer is not installed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ebbtide.client.client import read_spec
from ebbtide.errors import InvalidRequest
from ebbtide.trainer.model_directory import check_model_directory
from ebbtide.types.run import RunSpec


def check(spec: RunSpec) -> None:
    """Raises `InvalidRequest` naming the spec's field."""
    from ebbtide.trainer.environments import load_source

    check_model_directory(Path(spec.model))
    source = load_source(spec.environment.name, spec.environment.params, spec.seed)
    source.make("train", 0).reset()
    if spec.evaluation.problems:
        source.make("eval", spec.evaluation.problems - 1)


def main(argv: Sequence[str] | None = None) -> None:
    (path,) = sys.argv[1:] if argv is None else argv
    try:
        check(read_spec(json.loads(Path(path).read_text())))
    except InvalidRequest as error:
        print(json.dumps({"field": error.field, "message": str(error)}))  # noqa: T201 - the answer
        sys.exit(2)
    except ModuleNotFoundError:
        sys.exit(3)


if __name__ == "__main__":
    main()
