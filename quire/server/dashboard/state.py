"""`/dashboard/state` and `/dashboard/experts`: the engine at this moment, as the page draws it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from quire.metrics.instruments import Metric, Readings
from quire.protocol import __version__
from quire.protocol.expert_counts import ExpertCounts
from quire.protocol.messages import ID_SEPARATOR
from quire.protocol.output import BlockState, EngineSnapshot, SequenceSnapshot
from quire.server.http.auth import Tenant
from quire.server.state import ServerState, state_of

MAX_SHOWN = 128
"""Sequences listed of those that run, and of those that wait."""
COUNTERS = (
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
    *("generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")

router = APIRouter()


@router.get("/dashboard/state")
async def dashboard_state(request: Request, sequence: int | None = None) -> Response:
    """Everything the page shows, and the block table of one `sequence`."""
    state = state_of(request)
    client, wanted = state.llm.client, [] if sequence is None else [sequence]
    snapshot = await client.command(
        "snapshot", EngineSnapshot, max_waiting=MAX_SHOWN, tables_of=wanted
    )
    readings = await client.command("read_metrics", Readings)
    record = {
        **_about_server(state),
        **_about_engine(snapshot, _Visibility(state, request.state.tenant)),
        **_about_metrics(readings.all),
        "table": _table(snapshot, sequence),
    }
    return _reply(record)


@router.get("/dashboard/experts")
async def dashboard_experts(request: Request) -> Response:
    """How many tokens each expert of each layer got since the start. A large model has thousands of
    numbers, so the page asks for them less often than for its state."""
    counts = await state_of(request).llm.client.command("expert_counts", ExpertCounts)
    record = {
        "layers": counts.layers,
        "tokens": counts.tokens.tolist(),
        "used_per_step": [round(mean, 3) for mean in counts.used_per_step.tolist()],
        "num_steps": counts.num_steps,
    }
    return _reply(record)


def _reply(record: dict[str, Any]) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(record), headers=headers, media_type="application/json")


class _Visibility:
    """Whose requests a caller may know by name: where there are several tenants, its own."""

    def __init__(self, state: ServerState, tenant: Tenant) -> None:
        self._all = state.access.sees_all(tenant)
        self._tenant = tenant.name

    def covers(self, sequence: SequenceSnapshot) -> bool:
        return self._all or sequence.tenant == self._tenant


def _about_server(state: ServerState) -> dict[str, Any]:
    scheduler = state.llm.options.scheduler
    return {
        "model": state.model_names[0],
        "version": __version__,
        "max_model_len": state.llm.session.inputs.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
    }


def _about_engine(snapshot: EngineSnapshot, visible: _Visibility) -> dict[str, Any]:
    def listed(sequences: list[SequenceSnapshot]) -> list[dict[str, Any]]:
        return [_sequence(one, snapshot.time, visible) for one in sequences[:MAX_SHOWN]]

    return {
        "time": snapshot.time,
        "paused": snapshot.paused,
        "block_size": snapshot.block_size,
        "num_blocks": len(snapshot.blocks),
        "blocks": base64.b64encode(pack(snapshot.blocks)).decode(),
        "num_running": len(snapshot.running),
        "running": listed(snapshot.running),
        "num_waiting": snapshot.num_waiting,
        "waiting": listed(snapshot.waiting),
        "prompt_tokens_per_s": snapshot.prompt_tokens_per_s,
        "generation_tokens_per_s": snapshot.generation_tokens_per_s,
        "memory": msgspec.to_builtins(snapshot.memory),
        "advice": snapshot.advice,
    }


def pack(blocks: NDArray[np.uint8]) -> bytes:
    """States of blocks, four to a byte, the first in the lowest bits."""
    assert len(BlockState) <= 4
    padded = np.zeros((len(blocks) + 3) // 4 * 4, np.uint8)
    padded[: len(blocks)] = blocks
    return (
        np.bitwise_or.reduce(padded.reshape(-1, 4) << np.arange(0, 8, 2), axis=1)
        .astype(np.uint8)
        .tobytes()
    )


def _sequence(one: SequenceSnapshot, now: float, visible: _Visibility) -> dict[str, Any]:
    name = one.request_id.rpartition(ID_SEPARATOR)[0] or one.request_id
    return {
        "key": str(one.key),  # more digits than JavaScript's numbers have
        "request_id": name if visible.covers(one) else None,
        "state": one.state,
        "prompt_tokens": one.num_prompt_tokens,
        "tokens": one.num_tokens,
        "computed_tokens": one.num_computed_tokens,
        "num_blocks": one.num_blocks,
        "num_owned_blocks": one.num_owned_blocks,
        "age_s": round(max(now - one.arrival_time, 0.0), 3),
    }


def _table(snapshot: EngineSnapshot, key: int | None) -> dict[str, Any] | None:
    """Logical to physical, of the sequence that was asked for and still holds blocks."""
    for one in snapshot.running:
        if one.key == key:
            return {"key": str(key), "blocks": one.block_table.tolist()}
    return None


def _about_metrics(readings: Sequence[Metric]) -> dict[str, Any]:
    found: dict[str, Any] = {reading.name.partition(":")[2]: reading for reading in readings}
    record: dict[str, Any] = {name: found[name].value for name in COUNTERS}
    for name in HISTOGRAMS:
        histogram = found[name]
        record[name] = {
            "count": histogram.count,
            "sum": histogram.sum,
            "bounds": [float(bound) for bound in list(histogram.buckets)[:-1]],
            "counts": list(histogram.buckets.values()),
        }
    return record
