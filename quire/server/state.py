"""`ServerState`: what the routes of one API process share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.config.server import ServerOptions
from quire.frontend.async_llm import AsyncLLM
from quire.server.access import Access
from quire.server.errors import UnknownModelError
from quire.server.load import Load
from quire.server.tracing import Tracer


@dataclass
class ServerState:
    llm: AsyncLLM
    options: ServerOptions
    model_names: tuple[str, ...]
    access: Access
    tracer: Tracer | None = None
    load: Load = field(default_factory=Load.alone)
    report: Callable[[msgspec.Struct], None] = lambda message: None
    """Tells the supervisor, if there is one, something (`protocol/control.py`)."""
    restarting: bool = False
    """Whether an engine that died is being replaced."""
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, llm: AsyncLLM, options: ServerOptions) -> ServerState:
        names = options.serving.served_model_name or (llm.model_config.source.name,)
        endpoint = options.logging.otlp_traces_endpoint
        tracer = None if endpoint is None else Tracer(endpoint, names[0])
        return cls(llm, options, names, Access.of(options.access), tracer)

    def check_model(self, name: str | None) -> str:
        """The name to answer with, if requests for `name` are for this model."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise UnknownModelError(
                f"model {name!r} does not exist here; this server has "
                f"{', '.join(map(repr, self.model_names))}."
            )
        return name
