"""`/docs`: Swagger UI for the port's own schema, with files of this installation, without the internet."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse

from gateway.protocol.errors import Refused
from policy.errors import Refusal

_FOLDER = Path(str(files("fastapi_offline"))) / "static"
# A browser refuses to load anything from elsewhere. The page has an inline script, and images in its style.
_OWN_ONLY = {"content-security-policy": "default-src 'self' 'unsafe-inline' data:"}
_SCRIPT, _STYLE, _ICON = "swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def page(request: Request) -> HTMLResponse:
    """The page; its links are relative, so that it works behind a path prefix."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url=f"docs/{_SCRIPT}",
        swagger_css_url=f"docs/{_STYLE}",
        swagger_favicon_url=f"docs/{_ICON}",
        # By default a service on the internet is sent the schema's URL.
        swagger_ui_parameters={"validatorUrl": None},
    )
    page.headers.update(_OWN_ONLY)
    return page


@router.get("/docs/{name}")
async def asset(name: str) -> FileResponse:
    """One of the page's files."""
    if name not in (_SCRIPT, _STYLE, _ICON):
        raise Refused(Refusal.NOT_FOUND, "There is nothing at this path.")
    return FileResponse(_FOLDER / name)
