"""The messages that docs/troubleshooting.md explains are those of the code."""

from __future__ import annotations

import re

from paths import ROOT


def test_every_message_is_one_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    places = ("python/fastdist/**/*.py", "csrc/**/*.cpp", "csrc/**/*.h")
    sources = [path for place in places for path in ROOT.glob(place)]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    code = re.sub(r'"\s*\+?\s*f?"', "", code)  # a message that lies on several lines
    messages = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(messages) == page.count("\n### ")
    unknown = [
        message
        for message in messages
        if not all(part.strip() in code for part in message.split("…"))
    ]
    assert unknown == []
