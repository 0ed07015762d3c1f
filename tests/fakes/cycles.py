"""Finds what nothing refers to except itself, while the garbage collector is off."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """Nothing is collected within it but by `cycles`. These look only at what was made within it: the objects of a
    process that ran many tests would take seconds each time.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
        gc.collect()


def cycles(modules: tuple[str, ...], folder: str) -> Counter[str]:
    """Collects, and counts what was found: by type, of `modules`; by function, of frames of code in `folder`."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter[str]()
    for one in gc.garbage:
        name = f"{type(one).__module__}.{type(one).__qualname__}"
        code = getattr(one, "cr_code", None) or getattr(one, "f_code", None) or getattr(one, "ag_code", None)
        if code is not None and folder in code.co_filename:
            found[f"frame of {code.co_qualname}"] += 1
        elif name.startswith(modules):
            found[name] += 1
    gc.garbage.clear()
    gc.collect()
    return found
