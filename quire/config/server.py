"""The options of the HTTP server, declared like the engine's."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from quire.config.adapters import AdapterModule, as_texts, read_modules
from quire.config.fields import option
from quire.config.options import (
    CheckedOptions,
    OptionGroups,
    ParallelOptions,
    as_bytes,
    as_text,
    group_class,
)
from quire.config.reply_formats import REASONING_PARSERS, TOOL_PARSERS
from quire.protocol.errors import OptionError

AFTER_RANKS_S = 30.0
"""For an engine to tell which of its ranks is late, and to end them."""
_HOST_NAME = re.compile(r"\*|(\*\.)?[\w.-]+|[0-9A-Fa-f:.]+")


def _several(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class NetworkOptions(CheckedOptions):
    """Where the server listens."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: all of this machine's.")
    port: int = option(
        8000,
        "Port to listen on; 0: any that is free.",
        accepts=lambda value: 0 <= value <= 65535,
        rule="from 0 to 65535",
    )
    root_path: str = option(
        "",
        "Path under which a proxy shows this server, such as /llm; routes are served with it and "
        "without.",
        default_text="none",
        accepts=lambda value: not value or value[0] == "/" != value[-1],
        rule="a path that begins with '/' and does not end with it",
    )
    ssl_keyfile: str | None = option(
        None, "Private key for HTTPS (PEM).", default_text="plain HTTP", convert=as_text
    )
    ssl_certfile: str | None = option(
        None, "Certificate for HTTPS (PEM).", default_text="plain HTTP", convert=as_text
    )
    ssl_ca_certs: str | None = option(
        None,
        "Accept only clients with a certificate of these authorities (PEM).",
        default_text="all clients",
        convert=as_text,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Web pages of other sites that may call this server, such as https://example.org, or "
        "'*'; may be given several times.",
        default_text="none",
        convert=_several,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name by which clients may call this server, such as api.example.org, *.example.org "
        "or '*' for any, beside localhost and loopback addresses; may be given several times.",
        default_text="none if the server listens on a loopback address, else any",
        accepts=lambda names: all(_HOST_NAME.fullmatch(name) for name in names),
        rule="host names or addresses, without scheme and port",
        convert=_several,
    )
    max_body_bytes: int = option(
        32 << 20,
        "Largest request body, such as 32MiB.",
        default_text="32MiB",
        accepts=lambda value: value >= 1,
        rule="a number of bytes or a size such as 32MiB",
        convert=as_bytes,
    )
    client_timeout_s: float = option(
        60.0,
        "Longest wait for a client to send 64 KiB of its request (or the rest of it), or to take "
        "up more of its reply.",
        accepts=lambda value: value > 0,
        rule="above 0",
    )


@dataclass(frozen=True)
class AccessOptions(CheckedOptions):
    """Who may use the server."""

    api_key: tuple[str, ...] = option(
        (),
        "Key that clients must send; may be given several times.",
        default_text="none, everyone may",
        convert=_several,
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "File with one key per line, in addition to those of --api-key.",
        default_text="none",
        convert=as_text,
    )
    admin_key: str | None = option(
        None,
        "Key for the routes under /admin.",
        default_text="none, there are no such routes",
        secret=True,
    )
    trust_tenant_header: bool = option(
        False,
        "Let the header X-Tenant say for which tenant a request is made; for servers that only a "
        "gateway can reach, which sets it.",
    )
    share_prefix_cache: bool = option(
        False,
        "Let tenants use prefixes that others computed. Replies then count no cached tokens, but "
        "their timing tells whether another client has sent the same text; /metrics and the page "
        "need the admin key.",
    )


@dataclass(frozen=True)
class ServingOptions(CheckedOptions):
    """What the server serves, and with how many processes."""

    served_model_name: tuple[str, ...] = option(
        (),
        "Name of the model in requests and replies; may be given several times, the first one is "
        "used in replies.",
        default_text="as model",
        convert=_several,
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring their own chat template, which runs in a sandbox."
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls; auto: as its chat template shows.",
        choices=("auto", *TOOL_PARSERS),
    )
    reasoning_parser: str = option(
        "auto",
        "Which tags the model writes around its reasoning; auto: those of its chat template; none: "
        "reasoning stays in the text.",
        choices=("auto", "none", *REASONING_PARSERS),
    )
    api_server_count: int = option(
        1, "Processes that speak HTTP; all use the one engine.", minimum=1
    )
    max_engine_restarts: int = option(
        3, "How often the engine is started again after it died.", minimum=0
    )
    engine_timeout_s: float = option(
        300.0,
        "Longest time the engine may answer nothing, such as in a step that never ends, before it "
        "is ended and started again; with ranks at least 30 s more than "
        "distributed_timeout_seconds; 0: any.",
        minimum=0,
    )
    api_timeout_s: float = option(
        30.0,
        "Longest time an API process may answer nothing before it is ended and started again; "
        "0: any.",
        minimum=0,
    )
    drain_timeout_s: float = option(
        60.0, "Longest wait for open requests when the server is told to stop.", minimum=0
    )
    metrics_prefix: str = option(
        "quire",
        "What names of metrics begin with; vllm: as vLLM's do.",
        accepts=lambda value: re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", value) is not None,
        rule="a name of letters, digits and underscores",
    )

    def silence_s(self, parallel: ParallelOptions) -> float:
        """How long an engine may answer nothing. Where ranks have a deadline, it says what is late
        when that is over, and ends them."""
        if self.engine_timeout_s == 0 or not parallel.has_rank_processes:
            return self.engine_timeout_s
        return max(self.engine_timeout_s, parallel.timeout_s + AFTER_RANKS_S)


@dataclass(frozen=True)
class ServedAdapterOptions(CheckedOptions):
    """Adapters that requests can name as their model. Any of these options turns enable_lora on."""

    lora_modules: tuple[str, ...] = option(
        (),
        "Adapters to serve, as name=folder, or as JSON with name, path and perhaps "
        "base_model_name; several, or given several times.",
        default_text="none",
        convert=as_texts,
        accepts=lambda texts: read_modules(texts) is not None,
    )
    lora_folder: str | None = option(
        None,
        "Folder of which each folder with an adapter in it is served by its name, and loaded when "
        "it is first asked for.",
        default_text="none",
        convert=as_text,
    )
    allow_runtime_lora: bool = option(
        False,
        "Let those who have the admin key load and unload adapters while the server runs, from any "
        "folder that it can read (/v1/load_lora_adapter, /v1/unload_lora_adapter).",
    )

    @property
    def modules(self) -> tuple[AdapterModule, ...]:
        return read_modules(self.lora_modules)

    @property
    def has_any(self) -> bool:
        return bool(self.lora_modules or self.lora_folder or self.allow_runtime_lora)


@dataclass(frozen=True)
class LoggingOptions(CheckedOptions):
    """What the server tells about requests."""

    enable_log_requests: bool = option(False, "Write a line of JSON for each request that ends.")
    max_log_len: int = option(
        0,
        "Characters of each prompt and output in these lines.",
        default_text="0, no text",
        minimum=0,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Where spans for OpenTelemetry go, over HTTP, such as http://localhost:4318/v1/traces; "
        "needs the extra otel.",
        default_text="none are made",
        convert=as_text,
    )


@dataclass(frozen=True)
class ServerOptions(OptionGroups):
    """All options of one server but its engine's."""

    network: NetworkOptions = field(default_factory=NetworkOptions, metadata={"title": "network"})
    access: AccessOptions = field(default_factory=AccessOptions, metadata={"title": "access"})
    serving: ServingOptions = field(default_factory=ServingOptions, metadata={"title": "serving"})
    adapters: ServedAdapterOptions = field(
        default_factory=ServedAdapterOptions, metadata={"title": "adapters"}
    )
    logging: LoggingOptions = field(default_factory=LoggingOptions, metadata={"title": "logging"})

    def __post_init__(self) -> None:
        network = self.network
        if (network.ssl_keyfile is None) != (network.ssl_certfile is None):
            given = "ssl_keyfile" if network.ssl_keyfile else "ssl_certfile"
            other = "ssl_certfile" if network.ssl_keyfile else "ssl_keyfile"
            raise OptionError(f"{given} is set but {other} is not; HTTPS needs both.")
        if self.adapters.allow_runtime_lora and not self.access.admin_key:
            raise OptionError(
                "allow_runtime_lora needs admin_key, the key of those who may load adapters."
            )

    @classmethod
    def from_flat(cls, values: dict[str, Any]) -> ServerOptions:
        """Options by their flat names; those not given have their defaults."""
        groups = {}
        for group in dataclasses.fields(cls):
            kind = group_class(group)
            names = {item.name for item in dataclasses.fields(kind)}
            groups[group.name] = kind(**{k: v for k, v in values.items() if k in names})
        return cls(**groups)
