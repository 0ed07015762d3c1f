"""`ebbtide run chat` before a real gateway."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from tests.chaos.cluster import TOKEN
from tests.fakes.model_texts import byte_level_tokenizer
from tests.integration.gateway.conftest import GatewayStand

#: Without special tokens, whose ids the scripted engines do not know.
TEMPLATE: Final = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


async def test_a_message_is_answered_by_the_policy(stand: GatewayStand, tmp_path: Path) -> None:
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    await stand.gateway("g1")
    url = f"http://{stand.cluster.process['g1'].address}"
    command = [
        sys.executable,
        "-m",
        "ebbtide.cli",
        "run",
        "chat",
        "spell",
        "hi",
        "--max-tokens",
        "12",
        "--gateway",
        url,
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | {"EBBTIDE_TOKEN": TOKEN},
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    tokenizer = byte_level_tokenizer()
    prompt = tokenizer.encode("user: hi\n", add_special_tokens=False)
    text = tokenizer.decode(stand.expected(prompt, 12), skip_special_tokens=True)
    assert said.decode() == "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text) + "\n"
