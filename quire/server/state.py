"""`ServerState`: what the routes of one API process share."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from fastapi import Request

from quire.config.server import ServerOptions
from quire.frontend.async_llm import AsyncLLM
from quire.protocol.errors import OptionError
from quire.server.http.auth import Access
from quire.server.http.limits import BodyMemory
from quire.server.http.middleware import Load
from quire.server.preparation.adapter_names import AdapterSettings, reference_to
from quire.server.preparation.pool import ForkServer, PreparationPool
from quire.server.preparation.prepare import Preparation, PreparationSettings
from quire.server.tracing import Tracer


class ServerState:
    def __init__(
        self,
        llm: AsyncLLM,
        options: ServerOptions,
        *,
        fork_server: ForkServer | None = None,
        load: Load | None = None,
        adapters_file: str | None = None,
        report: Callable[[msgspec.Struct], None] = lambda message: None,
    ) -> None:
        """`fork_server` prepares requests; started when it is needed unless one is given. In
        `adapters_file` API processes write which adapters they were told of. `report` tells the
        supervisor, if there is one, something (`protocol/messages.py`)."""
        self.llm = llm
        self.options = options
        adapters = AdapterSettings.of(options.adapters, adapters_file)
        settings = PreparationSettings.of(self.llm.session, options.serving, adapters)
        self.model_names = settings.model_names
        self.access = Access.of(options.access)
        endpoint = options.logging.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint, self.model_names[0])
        self.load = load or Load.alone()
        self.report = report
        self.restarting = False
        """Whether an engine that died is being replaced."""
        self.created = int(time.time())
        self.body_memory = BodyMemory(options.network.max_body_bytes)
        self.preparation = Preparation.of(settings, self.llm.session)
        self.pool = PreparationPool(settings, fork_server)

    async def load_adapters(self) -> None:
        """Those that the server was started with; raises if one of them does not fit the model."""
        for module in self.options.adapters.modules:
            if module.name in self.model_names:
                raise OptionError(
                    f"lora_modules has {module.name!r}, which is the model's name; give it another."
                )
            await self.llm.add_lora(reference_to(module))


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
