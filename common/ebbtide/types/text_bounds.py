"""Bounds the texts that services store and list, and cuts longer ones."""

from typing import Final

#: Bytes of a reason: why a worker leaves or failed, why a run ended.
MAX_REASON_BYTES: Final = 1 << 10
#: Bytes of an event: each one is kept until every watcher has read it.
MAX_EVENT_BYTES: Final = 32 << 10
_MORE: Final = " ..."


def shortened(text: str, most: int = MAX_REASON_BYTES) -> str:
    """`text` in at most `most` bytes of UTF-8. A text that was cut ends with an ellipsis."""
    if len(text) * 4 <= most or len(data := text.encode()) <= most:
        return text
    return data[: most - len(_MORE)].decode(errors="ignore") + _MORE
