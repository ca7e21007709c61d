"""Spans for OpenTelemetry, one for each request to the engine. Names are vLLM's.

Only servers with `otlp_traces_endpoint` need the packages: `pip install '.[otel]'` in a clone.
"""

from __future__ import annotations

import importlib
import time
from typing import Any
from urllib.parse import urlsplit

from quire.frontend.output_processor import OpenRequest
from quire.protocol.errors import OptionError
from quire.server.request_log import FinishedRequest, end_of

EXPORT_TIMEOUT_S = 5
TRACES_PATH = "/v1/traces"


def check_tracing(endpoint: str) -> str:
    """The address that spans are sent to; raises if it or the packages will not do."""
    bad = OptionError(
        f"otlp_traces_endpoint={endpoint!r} is not an address for OTLP over HTTP, the protocol "
        f"that Quire speaks; give one such as http://localhost:4318{TRACES_PATH}."
    )
    try:
        address = urlsplit(endpoint)
    except ValueError:
        raise bad from None
    if address.scheme not in ("http", "https") or not address.netloc:
        raise bad
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        importlib.import_module("opentelemetry.sdk.trace")
    except ImportError as error:
        raise OptionError(
            f"otlp_traces_endpoint needs the package {error.name!r}; install it with "
            "`pip install '.[otel]'` in a clone of Quire, or leave the option out."
        ) from None
    return endpoint if address.path.strip("/") else f"{endpoint.rstrip('/')}{TRACES_PATH}"


class Tracer:
    def __init__(self, endpoint: str, model: str) -> None:
        address = check_tracing(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
        resource = Resource({"service.name": "quire"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(address, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def __call__(self, finished: FinishedRequest) -> None:
        context = self._propagator.extract(finished.headers)
        for made in finished.made:
            self._record(made, finished, context)

    def _record(self, made: OpenRequest, finished: FinishedRequest, context: Any) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        # Spans have times of day, the engine's clock has none.
        offset = time.time() - time.monotonic()
        times = made.metrics
        span = self._tracer.start_span(
            "llm_request",
            context,
            SpanKind.SERVER,
            attributes=attributes(made, finished.request_id, self._model),
            start_time=_nanoseconds(times.arrival_time + offset),
        )
        if made.error is not None:
            span.set_status(StatusCode.ERROR, made.error)
        span.end(_nanoseconds((times.finished_time or time.monotonic()) + offset))

    def shutdown(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def attributes(made: OpenRequest, request_id: str, model: str) -> dict[str, Any]:
    """Of one request; what is not known is left out."""
    params, times = made.params, made.metrics
    end = times.finished_time
    found = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": len(made.sequences),
        "gen_ai.usage.prompt_tokens": len(made.prompt_token_ids),
        "gen_ai.usage.completion_tokens": sum(len(one.token_ids) for one in made.sequences),
        "gen_ai.response.finish_reasons": [end_of(one) for one in made.sequences],
        "gen_ai.latency.time_in_queue": _between(times.arrival_time, times.first_scheduled_time),
        "gen_ai.latency.time_to_first_token": _between(times.arrival_time, times.first_token_time),
        "gen_ai.latency.e2e": _between(times.arrival_time, end),
        "gen_ai.latency.time_in_model_prefill": _between(
            times.first_scheduled_time, times.first_token_time
        ),
        "gen_ai.latency.time_in_model_decode": _between(times.first_token_time, end),
        "gen_ai.latency.time_in_model_inference": _between(times.first_scheduled_time, end),
    }
    return {name: value for name, value in found.items() if value is not None}


def _between(start: float, end: float) -> float | None:
    """None if one of the two never happened."""
    return end - start if start and end else None


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
