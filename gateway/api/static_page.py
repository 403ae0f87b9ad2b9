"""`/`: the page, static files of this folder. They have no data: what they show needs the token."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from gateway.protocol.errors import Refused
from policy.errors import Refusal

FOLDER = Path(__file__).parent / "page"
_FILES = frozenset(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*")
    if path.suffix in (".js", ".css", ".svg")
)
# Its own files and this port, no inline script or style, and in no frame.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> FileResponse:
    """The page; its links are relative, so that it works behind a path prefix."""
    return FileResponse(FOLDER / "index.html", headers=_HEADERS)


@router.get("/page/{name:path}")
async def asset(name: str) -> FileResponse:
    """One of the page's files."""
    if name not in _FILES:
        raise Refused(Refusal.NOT_FOUND, "There is nothing at this path.")
    return FileResponse(FOLDER / name, headers=_HEADERS)
