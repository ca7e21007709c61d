"""`/`, `/docs` and `/static/...`: files of pages, the same for everyone, and so without a key."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.server.http.auth import STATIC_PREFIX

FOLDER = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
FILES = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}

# Nothing but this server's own files runs, and text never becomes markup: a model that writes
# HTML, or a request with a strange name, can do no harm on the page.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index() -> Response:
    return _file("index.html")


@router.get("/docs")
async def docs() -> Response:
    return _file("docs.html")


@router.get(STATIC_PREFIX + "{name}")
async def static_file(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    if name not in FILES:
        raise HTTPException(404, f"the page has no file {name!r}.")
    return Response(
        FILES[name], headers=SECURITY_HEADERS, media_type=MEDIA_TYPES[Path(name).suffix]
    )
