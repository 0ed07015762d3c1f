"""`python -m ebbtide.trainer.trainer_preflight SPEC.json`: would this run's model, trainer and environment do? Asked
before it is submitted.

A process of its own, so that the command line, which may be installed without the trainer, need not import it. Exit
status 0: they would; 2: they would not, with {"field", "message"} as JSON on stdout; 3: the trainer is not installed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ebbtide.claimed_runs.conversation import load_conversations
from ebbtide.claimed_runs.model_directory import check_model_directory
from ebbtide.client.client import read_spec
from ebbtide.environments import Message
from ebbtide.errors import InvalidRequest
from ebbtide.trainer.service import GRPO, load_trainer
from ebbtide.types.run import RunSpec


def check(spec: RunSpec) -> None:
    """Raises `InvalidRequest` naming the spec's field. Of an external run only the model is looked at."""
    from ebbtide.environments import load_source

    check_model_directory(Path(spec.model))
    if spec.external:
        return
    if spec.trainer.name != GRPO:
        load_trainer(spec.trainer.name)
    source = load_source(spec.environment.name, spec.environment.params, spec.seed)
    opening = source.make("train", 0).reset()
    if spec.evaluation.problems:
        source.make("eval", spec.evaluation.problems - 1)
    _check_room(spec, opening)


def _check_room(spec: RunSpec, opening: Sequence[Message]) -> None:
    """Refuse responses for which the model's context has no room behind a prompt."""
    conversations = load_conversations(spec.model)
    prompt, wanted = len(conversations.opening(opening)), spec.sampling.max_tokens
    if 0 < conversations.context < prompt + wanted:
        raise InvalidRequest(
            f"{wanted} tokens do not fit behind a prompt of {prompt} into the model's context of "
            f"{conversations.context}; at most {conversations.context - prompt} do",
            field="sampling.max_tokens",
        )


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
