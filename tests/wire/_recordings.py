"""Recorded real traffic, read from the folder that ``TREEWARDEN_SHARED`` names.

The recordings are not part of the repository. Where the folder is absent, a test that wants them is
skipped and says so; where it is there, every exchange of the wanted kind is used.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

ROOT = Path(__file__).parent.parent.parent
SHARED = Path(os.environ.get("TREEWARDEN_SHARED", ROOT.parent / "shared"))
TRAFFIC = SHARED / "data" / "provider-traffic"
ABSENT = pytest.mark.skip(reason="no recorded traffic: set TREEWARDEN_SHARED to where it is")

# Which wire format an exchange is in, by where the request went.
ANTHROPIC = "anthropic"
OPENAI_CHAT = "openai_chat"


@attrs.frozen
class Exchange:
    """One recorded request and its answer. ``usage`` is what the manifest says was reported."""

    file: str
    place: int
    uri: str
    request: dict[str, Any]
    status: int
    headers: dict[str, str]
    body: bytes
    usage: dict[str, Any] | None

    @property
    def provider(self) -> str:
        return self.file.split("/")[0]

    @property
    def wire(self) -> str | None:
        if "/v1/messages" in self.uri:
            return ANTHROPIC
        return OPENAI_CHAT if "/chat/completions" in self.uri else None

    @property
    def is_answer(self) -> bool:
        """False for a count of tokens, which is no answer of a model."""
        return self.status == 200 and "count_tokens" not in self.uri

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and bool(self.request.get("stream"))


def exchanges(wire: str) -> list[Exchange]:
    """Return every recorded exchange in this wire format, none where there is no folder."""
    return [e for e in _all_exchanges() if e.wire == wire]


def cases(wanted: Sequence[Exchange]) -> list[Any]:
    """Return test parameters, a skipped one where the recordings are absent."""
    if not TRAFFIC.is_dir():
        return [pytest.param(None, marks=ABSENT, id="absent")]
    assert wanted, "the folder is there, but not what the test wants from it"
    return [pytest.param(e, id=f"{e.file.removesuffix('.json')}-{e.place}") for e in wanted]


def _all_exchanges() -> Iterator[Exchange]:
    if not TRAFFIC.is_dir():
        return
    for entry in json.loads((TRAFFIC / "MANIFEST.json").read_text()):
        recording = json.loads((TRAFFIC / entry["file"]).read_text())
        pairs = zip(recording["interactions"], entry["usage"], strict=True)
        for place, (pair, usage) in enumerate(pairs):
            request, response = pair["request"], pair["response"]
            body = response["body"]
            yield Exchange(
                file=entry["file"],
                place=place,
                uri=request["uri"],
                request=request["body"] or {},
                status=response["status"],
                headers=response["headers"],
                body=(body if isinstance(body, str) else json.dumps(body)).encode(),
                usage=usage,
            )


def cuts(body: bytes) -> Iterator[list[bytes]]:
    """Yield ``body`` in the pieces that a decoder must not care about.

    Byte by byte, and in two pieces: at every place up to 4 KiB, else at 500 places by chance.
    """
    yield [body[i : i + 1] for i in range(len(body))]
    places: Sequence[int] = range(1, len(body))
    if len(body) > 4096:
        places = sorted(random.Random(len(body)).sample(places, 500))
    for place in places:
        yield [body[:place], body[place:]]
