"""The place of the HTTP cases in this benchmark: how often the guard and an independent parser disagree."""


def http_disagreements(cases: int) -> int | None:  # noqa: ARG001 - for the fuzzer that belongs here
    """Disagreements in so many generated messages; None: not measured."""
    return None
