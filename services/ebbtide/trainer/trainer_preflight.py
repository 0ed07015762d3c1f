"""Checks a run's model, trainer and environment before submit: `python -m ebbtide.trainer.trainer_preflight SPEC.json`.

It runs as a process of its own, as the command line may be installed without the trainer. What runs may name it reads
where a trainer started here would. Exit status 0: accepted, perhaps with {"warning"} as JSON on stdout; 2: refused,
with {"field", "message"}; 3: the trainer is not installed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ebbtide.client.client import read_spec
from ebbtide.environments import Message
from ebbtide.errors import InvalidRequest
from ebbtide.hub_models import cached_model
from ebbtide.run_client import check_model_directory, load_conversations
from ebbtide.settings import read
from ebbtide.trainer.memory_estimate import check_memory
from ebbtide.trainer.service import check_trainable, load_trainer
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.run import RunSpec


def check(spec: RunSpec, settings: TrainerSettings) -> str:
    """Returns a warning, or nothing. Raises `InvalidRequest` naming the spec's field. Of an external run it checks only
    the model."""
    from ebbtide.environments import load_source
    from ebbtide.environments.session_verifiers import load_verifier

    if (folder := cached_model(spec.model)) is None:
        return f"{spec.model!r} is not in this machine's cache, and was not checked; trainer and driver will fetch it"
    check_model_directory(folder)
    if spec.external:
        return ""
    check_trainable(spec, settings)
    if not spec.built_in:
        load_trainer(spec.trainer.name)
    if spec.from_agents:
        for verifier in spec.environment.verifiers.values():
            load_verifier(verifier)
        return _memory_warning(spec, settings, spec.sampling.max_tokens)
    source = load_source(spec.environment.name, spec.environment.params, spec.seed)
    opening = source.make("train", 0).reset()
    if spec.evaluation.problems:
        source.make("eval", spec.evaluation.problems - 1)
    longest = _check_room(spec, opening)
    return _memory_warning(spec, settings, longest)


def _memory_warning(spec: RunSpec, settings: TrainerSettings, longest: int) -> str:
    """Says if the run does not fit into this host's GPUs. The trainer may have others, or more ranks, and refuses for
    itself."""
    try:
        return check_memory(spec, settings, ranks=settings.ranks, longest=longest)
    except InvalidRequest as error:
        return f"a trainer that was started here would refuse the run: {error}"


def _check_room(spec: RunSpec, opening: Sequence[Message]) -> int:
    """Returns the tokens of prompt and response. Raises `InvalidRequest` if they exceed the run's context, or this the
    model's."""
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
            f"{wanted} tokens do not fit after a prompt of {prompt} into the {whose} of {context}; at most "
            f"{context - prompt} do",
            field="sampling.max_tokens",
        )
    return prompt + wanted


def _settings() -> TrainerSettings:
    """Reads the trainer's settings. Relative roots are left out: they lie in the trainer's working directory."""
    settings = read(TrainerSettings, prog="ebbtide serve trainer", argv=[])
    roots = {
        name: tuple(root for root in getattr(settings, name) if Path(root).is_absolute()) or ("/",)
        for name in ("model_roots", "data_roots", "output_roots")
    }
    return msgspec.structs.replace(settings, **roots)


def main(argv: Sequence[str] | None = None) -> None:
    (path,) = sys.argv[1:] if argv is None else argv
    try:
        warning = check(read_spec(json.loads(Path(path).read_text())), _settings())
    except InvalidRequest as error:
        print(json.dumps({"field": error.field, "message": error.text}))  # noqa: T201 - the answer
        sys.exit(2)
    except ModuleNotFoundError:
        sys.exit(3)
    if warning:
        print(json.dumps({"warning": warning}))  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
