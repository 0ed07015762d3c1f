"""Checks a run's model, trainer and environment before submit: `python -m ebbtide.trainer.trainer_preflight SPEC.json`.

It runs as a process of its own, as the command line may be installed without the trainer. What runs may name it reads
where a trainer started here would. Exit status 0: accepted; 2: refused, with {"field", "message"} as JSON on stdout; 3:
the trainer is not installed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ebbtide.claimed_runs.model_directory import check_model_directory
from ebbtide.claimed_runs.run_loop import load_conversations
from ebbtide.client.client import read_spec
from ebbtide.environments import Message
from ebbtide.errors import InvalidRequest
from ebbtide.settings import read
from ebbtide.trainer.service import check_trainable, load_trainer
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.run import RunSpec


def check(spec: RunSpec, settings: TrainerSettings) -> None:
    """Raises `InvalidRequest` naming the spec's field. Of an external run it checks only the model."""
    from ebbtide.environments import load_source
    from ebbtide.environments.session_verifiers import load_verifier

    check_model_directory(Path(spec.model))
    if spec.external:
        return
    check_trainable(spec, settings)
    if not spec.built_in:
        load_trainer(spec.trainer.name)
    if spec.from_agents:
        for verifier in spec.environment.verifiers.values():
            load_verifier(verifier)
        return
    source = load_source(spec.environment.name, spec.environment.params, spec.seed)
    opening = source.make("train", 0).reset()
    if spec.evaluation.problems:
        source.make("eval", spec.evaluation.problems - 1)
    _check_room(spec, opening)


def _check_room(spec: RunSpec, opening: Sequence[Message]) -> None:
    """Raises `InvalidRequest` if prompt and response exceed the run's context, or this the model's."""
    conversations = load_conversations(spec.model)
    if 0 < conversations.context < spec.max_model_len:
        raise InvalidRequest(
            f"the model's context is {conversations.context}; set that, or leave it out", field="max_model_len"
        )
    prompt, wanted = len(conversations.opening(opening)), spec.sampling.max_tokens
    context = spec.max_model_len or conversations.context
    if 0 < context < prompt + wanted:
        whose = "run's max_model_len" if spec.max_model_len else "model's context"
        raise InvalidRequest(
            f"{wanted} tokens do not fit behind a prompt of {prompt} into the {whose} of {context}; at most "
            f"{context - prompt} do",
            field="sampling.max_tokens",
        )


def _settings() -> TrainerSettings:
    """Reads the trainer's settings. Relative roots are left out: they lie in the trainer's working directory."""
    settings = read(TrainerSettings, prog="ebbtide trainer", argv=[])
    roots = {
        name: tuple(root for root in getattr(settings, name) if Path(root).is_absolute()) or ("/",)
        for name in ("model_roots", "output_roots")
    }
    return msgspec.structs.replace(settings, **roots)


def main(argv: Sequence[str] | None = None) -> None:
    (path,) = sys.argv[1:] if argv is None else argv
    try:
        check(read_spec(json.loads(Path(path).read_text())), _settings())
    except InvalidRequest as error:
        print(json.dumps({"field": error.field, "message": str(error)}))  # noqa: T201 - the answer
        sys.exit(2)
    except ModuleNotFoundError:
        sys.exit(3)


if __name__ == "__main__":
    main()
