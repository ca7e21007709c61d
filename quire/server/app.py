"""The FastAPI application of one API process: its routes, and what lies before them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quire.protocol import __version__
from quire.server import adapters, admin, health, models, tokenize
from quire.server.anthropic import messages
from quire.server.dashboard import page
from quire.server.dashboard import state as dashboard_state
from quire.server.http.errors import ErrorReply, add_error_handlers, described_errors
from quire.server.http.middleware import Middleware
from quire.server.openai import chat, completions, embeddings, responses
from quire.server.request_log import Observer, RequestLog
from quire.server.state import ServerState

ROUTES = (
    *(health, models, tokenize, completions, chat, embeddings, responses, messages),
    *(page, dashboard_state),
)


def build_app(state: ServerState) -> ASGIApp:
    """All routes behind the middleware."""
    app = FastAPI(
        title="Quire",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=described_errors(ErrorReply),
    )
    app.state.server = state
    add_error_handlers(app)
    for module in ROUTES:
        app.include_router(module.router)
    if not state.access.admin_keys.is_open:
        app.include_router(admin.router)
    if state.options.adapters.allow_runtime_lora:
        app.include_router(adapters.router)
    network = state.options.network
    guarded = Middleware(app, network, state.access, state.load, _observers(state))
    if not network.allowed_origins:
        return guarded
    return CORSMiddleware(
        guarded, allow_origins=network.allowed_origins, allow_methods=("*",), allow_headers=("*",)
    )


def _observers(state: ServerState) -> list[Observer]:
    options = state.options.logging
    observers: list[Observer] = []
    if options.enable_log_requests:
        observers.append(RequestLog(options.max_log_len))
    if state.tracer is not None:
        observers.append(state.tracer)
    return observers
