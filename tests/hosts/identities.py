"""Who is who on the hosts."""

from collections.abc import Mapping
from pathlib import Path


class Identities:
    def __init__(self, directory: Path, addresses: Mapping[str, str]) -> None:
        directory.mkdir()

    def environment(self, name: str) -> dict[str, str]:
        return {"EBBTIDE_TOKEN": "a-token-of-tests", "EBBTIDE_ALLOW_INSECURE": "true"}
