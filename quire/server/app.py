"""The FastAPI application of one API process."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from quire import __version__
from quire.server import admin, metrics, operations
from quire.server.anthropic import messages
from quire.server.dashboard import page
from quire.server.dashboard import state as dashboard_state
from quire.server.finished import Observer, Watch
from quire.server.http.errors import ERRORS, add_error_handlers
from quire.server.http.hosts import Hosts
from quire.server.http.load import CountedRequests
from quire.server.http.middleware import Gate
from quire.server.openai import chat, completions, embeddings, responses
from quire.server.request_log import RequestLog
from quire.server.root_path import RootPath
from quire.server.state import ServerState


def build_app(state: ServerState) -> Any:
    """All routes behind the gate."""
    app = FastAPI(
        title="Quire", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS
    )
    app.state.server = state
    add_error_handlers(app)
    openai_routes = (completions, chat, embeddings, responses)
    for module in (operations, metrics, *openai_routes, messages, page, dashboard_state):
        app.include_router(module.router)
    if not state.access.admin_keys.is_open:
        app.include_router(admin.router)
    network = state.options.network
    counted = CountedRequests(app, state.load)
    gated: Any = Gate(counted, Hosts.of(network), state.access, network.max_body_bytes)
    if observers := _observers(state):
        gated = Watch(gated, observers)
    if network.allowed_origins:
        gated = CORSMiddleware(
            gated,
            allow_origins=network.allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
        )
    return RootPath(gated, network.root_path) if network.root_path else gated


def _observers(state: ServerState) -> list[Observer]:
    options = state.options.logging
    observers: list[Observer] = []
    if options.enable_log_requests:
        observers.append(RequestLog(options.max_log_len))
    if state.tracer is not None:
        observers.append(state.tracer)
    return observers
