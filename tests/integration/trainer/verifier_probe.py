"""Verifiers that do what right, broken and hostile ones would do."""

import os
import time
from pathlib import Path
from typing import Any

from ebbtide.environments.session_verifiers import VerifiedSession


def exact(session: VerifiedSession) -> float:
    return float(session.answer == session.data["answer"])


def told(session: VerifiedSession) -> Any:
    """Does what the session's client says."""
    match session.data["deed"]:
        case "raise":
            raise ValueError("no such problem")
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(60)
        case "text":
            return "much"
        case "infinite":
            return float("inf")
        case "read":
            return float(len(Path(session.data["path"]).read_text()))
    return 0.5
