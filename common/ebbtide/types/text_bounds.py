"""How long texts may be that services write down and list, and how longer ones are cut."""

from typing import Final

#: Why a worker leaves or could not do something; why a run ended.
MAX_REASON_BYTES: Final = 1 << 10
#: An event: each is held for every watcher that has yet to read it.
MAX_EVENT_BYTES: Final = 32 << 10
_MORE: Final = " ..."


def shortened(text: str, most: int = MAX_REASON_BYTES) -> str:
    """`text`, in at most so many bytes of UTF-8; where it was longer, its end says that it goes on."""
    if len(text) * 4 <= most or len(data := text.encode()) <= most:
        return text
    return data[: most - len(_MORE)].decode(errors="ignore") + _MORE
