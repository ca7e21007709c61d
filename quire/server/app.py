"""The FastAPI application of one API process."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from quire import __version__
from quire.server import admin, metrics, operations
from quire.server.errors import add_error_handlers
from quire.server.gate import Gate
from quire.server.openai import chat, completions, embeddings, responses
from quire.server.state import ServerState


def build_app(state: ServerState) -> Any:
    """All routes behind the gate."""
    app = FastAPI(title="Quire", version=__version__, redoc_url=None)
    app.state.server = state
    add_error_handlers(app)
    for module in (operations, metrics, completions, chat, embeddings, responses):
        app.include_router(module.router)
    if not state.admin_keys.is_open:
        app.include_router(admin.router)
    network = state.options.network
    gated: Any = Gate(app, state.keys, state.admin_keys, network.max_body_bytes)
    if network.allowed_origins:
        gated = CORSMiddleware(
            gated,
            allow_origins=network.allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
        )
    return gated
