"""`ServerState`: what the routes of one API process share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.config.server import ServerOptions
from quire.frontend.async_llm import AsyncLLM
from quire.server.http.auth import Access
from quire.server.http.load import Load
from quire.server.preparation.context import Preparation, PreparationSettings
from quire.server.preparation.pool import MAX_HELD_BODIES, ForkServer, PreparationPool
from quire.server.tracing import Tracer


@dataclass
class ServerState:
    llm: AsyncLLM
    options: ServerOptions
    model_names: tuple[str, ...]
    access: Access
    tracer: Tracer | None = None
    fork_server: ForkServer | None = None
    """Prepares requests; started when it is needed unless one is given."""
    load: Load = field(default_factory=Load.alone)
    report: Callable[[msgspec.Struct], None] = lambda message: None
    """Tells the supervisor, if there is one, something (`protocol/control.py`)."""
    restarting: bool = False
    """Whether an engine that died is being replaced."""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        session, serving = self.llm.session, self.options.serving
        self.preparation = Preparation.of(session, serving, self.model_names)
        names = dataclasses.asdict(serving)
        settings = PreparationSettings.of(session, names, self.model_names)
        self.pool = PreparationPool(
            settings, self.fork_server, MAX_HELD_BODIES * self.options.network.max_body_bytes
        )

    @classmethod
    def of(
        cls, llm: AsyncLLM, options: ServerOptions, fork_server: ForkServer | None = None
    ) -> ServerState:
        names = options.serving.served_model_name or (llm.model_config.source.name,)
        endpoint = options.logging.otlp_traces_endpoint
        tracer = None if endpoint is None else Tracer(endpoint, names[0])
        return cls(llm, options, names, Access.of(options.access), tracer, fork_server)

    def check_model(self, name: str | None) -> str:
        """The name to answer with, if requests for `name` are for this model."""
        return self.preparation.check_model(name)
