"""Steps on made-up tokens before the engine is ready: nothing compiles while requests wait."""

from __future__ import annotations

import numpy as np
import torch

from quire.layers.attention.backend import AttentionBackend, AttentionInputs
from quire.models.registry import CausalLM
from quire.protocol.plan import Int32Array
from quire.worker.request_table import RequestTable


def warm_up_steps(max_rows: int, with_decode: bool) -> list[Int32Array]:
    """New tokens of each request, for steps that meet all kernels together.

    Decode kernels depend on the number of requests by powers of two. Captured graphs have met
    them already.
    """
    steps = [np.array([2], np.int32)]
    if with_decode:
        sizes = [1 << i for i in range(max_rows.bit_length())]
        steps += [np.ones(size, np.int32) for size in [*sizes, max_rows]]
    return steps


@torch.inference_mode()
def warm_up(
    model: CausalLM, attention: AttentionBackend, table: RequestTable, with_decode: bool
) -> None:
    """Run the model on steps of each kind. Nothing is stored, and no result is looked at."""
    device = table.device
    for lens in warm_up_steps(len(table.num_tokens), with_decode):
        num_requests, num_tokens = len(lens), int(lens.sum())
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        starts, contexts = table.staging.send(np.cumsum([0, *lens], dtype=np.int32), lens)
        inputs = AttentionInputs(
            query_start=starts.clone(),
            context_lens=contexts.clone(),
            block_tables=table.block_tables[0, :num_requests].clone(),
            slots=zeros - 1,
            query_lens=lens,
            send=table.staging.send,
        )
        hidden = model(zeros, zeros, attention.plan(inputs))
        model.logits(hidden[:num_requests])
