"""JSON and NDJSON responses, encoded by msgspec."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse


class JsonResponse(Response):
    """A value that msgspec can encode, or ``bytes`` that are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode ``content``."""
        return content if isinstance(content, bytes) else msgspec.json.encode(content)


class NdjsonResponse(StreamingResponse):
    """Lines of JSON, sent as they come."""

    media_type = "application/x-ndjson"
