"""Chooses between a kernel and its plain-torch reference by where the tensors lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.experts import ClampedGate, ExpertsConfig
from quire.kernels import cpu
from quire.kernels.adapter_pool import AdapterTokens, LayerAdapters
from quire.kernels.expert_matrices import ExpertMatrices
from quire.kernels.torch import experts
from quire.kernels.torch.bitmask import apply_bitmask as apply_bitmask_reference
from quire.kernels.torch.experts import Routing
from quire.kernels.torch.logprobs import Summary
from quire.kernels.torch.logprobs import summarize as summarize_reference
from quire.kernels.torch.lora import add_adapters as add_adapters_reference
from quire.kernels.torch.lora import add_to_embedding as add_to_embedding_reference
from quire.kernels.torch.ngrams import NgramSettings
from quire.kernels.torch.ngrams import propose_ngrams as propose_ngrams_reference
from quire.kernels.torch.penalties import PenaltySettings
from quire.kernels.torch.penalties import count_uses as count_uses_reference
from quire.kernels.torch.penalties import penalize as penalize_reference
from quire.kernels.torch.qkv import rms_norm as rms_norm_reference
from quire.kernels.torch.rows import DraftedRows
from quire.kernels.torch.rows import accept_tokens as accept_tokens_reference
from quire.kernels.torch.rows import write_drafts as write_drafts_reference
from quire.kernels.torch.sampling import Kinds, RowSettings
from quire.kernels.torch.sampling import sample_tokens as sample_tokens_reference


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * weight, x + residual); the residual may be overwritten."""
    if x.is_cuda and x.dim() == 2:
        from quire.kernels.triton import norm

        return norm.rms_norm(x, weight, eps, residual), x if residual is None else residual
    total = x if residual is None else x + residual
    return rms_norm_reference(total, weight, eps), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up joined in the last dimension."""
    if gate_up.is_cuda and gate_up.dim() == 2:
        from quire.kernels.triton import activation

        return activation.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x W^T + bias for x [tokens, inputs]; into `out` if given, which goes without a bias and may
    be float32 where x has 16 bits."""
    if _is_vector(x):
        from quire.kernels.triton.gemv import gemv

        return gemv(x, weight, bias, out=out)[0]
    if out is None:
        return F.linear(x, weight, bias)
    assert bias is None
    if out.dtype == x.dtype:
        return torch.mm(x, weight.t(), out=out)
    if x.is_cuda and torch.version.hip is None:
        return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    return torch.mm(x.to(out.dtype), weight.to(out.dtype).t(), out=out)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) W^T + bias, x + residual), with `silu_and_mul` of the first if `gated`;
    the residual may be overwritten."""
    if _is_vector(x):
        from quire.kernels.triton.gemv import MAX_FUSED_INPUTS, NormInput, gemv

        if x.shape[1] <= MAX_FUSED_INPUTS:
            return gemv(x, weight, bias, NormInput(norm_weight, eps, residual), gated)
    normal, total = rms_norm(x, norm_weight, eps, residual)
    out = linear(normal, weight, bias)
    return silu_and_mul(out) if gated else out, total


def _is_vector(x: Tensor) -> bool:
    """Whether a linear layer of x is a matrix times a vector on a GPU."""
    return x.is_cuda and x.shape[0] == 1 and x.is_contiguous()


def route(logits: Tensor, config: ExpertsConfig, bias: Tensor | None = None) -> Routing:
    """The experts of each token by its router logits [tokens, experts]; `bias` [experts] is the
    score correction of sigmoid routers."""
    if logits.is_cuda:
        from quire.kernels.triton import routing as triton_routing

        return triton_routing.route(logits, config, bias)
    if logits.is_cpu and logits.dtype == torch.float32 and cpu.available()[0]:
        from quire.kernels.cpu.experts import route as native

        return native(logits, config, bias)
    groups = config.num_groups, config.top_groups
    if config.scoring == "softmax" and config.num_groups > 1:
        routing = experts.softmax_in_groups(logits, config.top_k, *groups, config.normalizes)
    elif config.scoring == "softmax":
        routing = experts.softmax_then_top_k(logits, config.top_k, config.normalizes)
    elif config.scoring == "softmax_of_chosen":
        routing = experts.top_k_then_softmax(logits, config.top_k)
    else:
        assert bias is not None
        routing = experts.sigmoid_in_groups(logits, bias, config.top_k, *groups, config.normalizes)
    if config.factor != 1.0:
        routing = Routing(routing.experts, routing.weights * config.factor)
    return routing


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    if x.is_cpu and x.dtype == torch.float32 and cpu.available()[0]:
        from quire.kernels.cpu.experts import sigmoid as native

        return native(x)
    return x.sigmoid()


def expert_mlp(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor | ExpertMatrices,
    down: Tensor | ExpertMatrices,
    first_expert: int = 0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate: ClampedGate | None = None,
) -> Tensor:
    """What experts make of their tokens x [tokens, hidden], summed up by token."""
    others = first_expert, gate_up_bias, down_bias, gate
    if x.is_cuda:
        from quire.kernels.triton import experts as triton_experts

        return triton_experts.expert_mlp(x, routing, gate_up, down, *others)
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "packed for a GPU"
    return experts.expert_mlp(x, routing, gate_up, down, *others)


def expert_product(
    x: Tensor,
    matrices: ExpertMatrices,
    expert: int,
    first_expert: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """x W^T + bias of one of the experts that are packed for a GPU; `bias` is that of all."""
    from quire.kernels.triton import experts as triton_experts

    return triton_experts.expert_product(x, matrices, expert, first_expert, bias)


def gate_and_mul(gate_up: Tensor, gate: ClampedGate | None) -> Tensor:
    """What the gates of experts make of gate and up joined in the last dimension."""
    if gate is None:
        return silu_and_mul(gate_up)
    return experts.clamped_gate_and_mul(gate_up, gate)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """The rows of table [rows, dim] that `ids` [tokens] name."""
    if table.is_cuda and ids.dim() == 1:
        from quire.kernels.triton import embedding

        return embedding.embedding(ids, table)
    return F.embedding(ids, table)


def adapter_tokens(slots: Tensor, num_slots: int) -> AdapterTokens:
    """The tokens of a step by the slots of their adapters, int32 [tokens]."""
    if not slots.is_cuda:
        return AdapterTokens(slots)
    from quire.kernels.triton.lora import tiles_by_adapter

    return AdapterTokens(slots, tiles_by_adapter(slots, num_slots))


def add_adapters(
    x: Tensor, out: Tensor, bias: Tensor | None, adapters: LayerAdapters, tokens: AdapterTokens
) -> None:
    """Adds to out [tokens, outputs] = x W^T + bias what the adapters of the tokens add to it."""
    if x.is_cuda:
        from quire.kernels.triton import lora as triton_lora

        triton_lora.add_adapters(x, out, bias, adapters, tokens)
    elif x.is_cpu and x.dtype == torch.float32 and cpu.available()[0]:
        from quire.kernels.cpu.lora import add_adapters as native

        native(x, out, bias, adapters, tokens)
    else:
        add_adapters_reference(x, out, bias, adapters, tokens)


def add_to_embedding(
    ids: Tensor, out: Tensor, adapters: LayerAdapters, tokens: AdapterTokens
) -> None:
    """Adds to out [tokens, dim], rows of a table, what adapters have for the same rows."""
    if out.is_cuda:
        from quire.kernels.triton import lora as triton_lora

        triton_lora.add_to_embedding(ids, out, adapters, tokens)
    else:
        add_to_embedding_reference(ids, out, adapters, tokens)


def argmax(logits: Tensor) -> Tensor:
    """The place of the largest number in each line of logits [S, V], the first of equals; int64."""
    if logits.is_cpu and logits.dtype == torch.float32 and cpu.available()[0]:
        from quire.kernels.cpu import sampling as native

        return native.largest(logits).long()
    return logits.argmax(-1)


def sample_tokens(
    logits: Tensor, rows: Tensor, positions: Tensor, settings: RowSettings, kinds: Kinds
) -> Tensor:
    """One token for each line of logits [S, V], as the settings of its row say; int32 [S]."""
    if logits.is_cuda:
        from quire.kernels.triton import sampling

        return sampling.sample_tokens(logits, rows, positions, settings, kinds)
    if logits.dtype == torch.float32 and cpu.available()[0]:
        from quire.kernels.cpu import sampling as native

        if not kinds.draws:
            return native.largest(logits)
        return native.sample_tokens(logits, rows, positions, settings)
    return sample_tokens_reference(logits, rows, positions, settings)


def accept_tokens(
    rows: Tensor, first_lines: Tensor, num_lines: Tensor, tokens: Tensor, table: DraftedRows
) -> Tensor:
    """How many of the tokens sampled in its lines each of `rows` accepts; int32 [R]."""
    if rows.is_cuda:
        from quire.kernels.triton import rows as triton_rows

        return triton_rows.accept_tokens(rows, first_lines, num_lines, tokens, table)
    if cpu.available()[0]:
        from quire.kernels.cpu.drafts import accept_tokens as native

        return native(rows, first_lines, num_lines, tokens, table)
    return accept_tokens_reference(rows, first_lines, num_lines, tokens, table)


def write_drafts(rows: Tensor, drafts: Tensor, table: DraftedRows) -> Tensor:
    """Puts drafts [R, k] behind the known tokens of `rows`, as many as fit and are not negative;
    how many wait in each, int32 [R]."""
    if rows.is_cuda:
        from quire.kernels.triton import rows as triton_rows

        triton_rows.write_drafts(rows, drafts, table)
        return table.num_drafts[rows]
    if cpu.available()[0]:
        from quire.kernels.cpu.drafts import write_drafts as native

        return native(rows, drafts, table)
    return write_drafts_reference(rows, drafts, table)


def propose_ngrams(
    token_ids: Tensor, num_tokens: Tensor, rows: Tensor, settings: NgramSettings
) -> Tensor:
    """Drafts for each of `rows`; int32 [R, drafts], -1 where there are none."""
    if rows.is_cuda:
        from quire.kernels.triton import ngrams

        return ngrams.propose_ngrams(token_ids, num_tokens, rows, settings)
    if cpu.available()[0]:
        from quire.kernels.cpu.drafts import propose_ngrams as native

        return native(token_ids, num_tokens, rows, settings)
    return propose_ngrams_reference(token_ids, num_tokens, rows, settings)


def summarize(logits: Tensor, tokens: Tensor, num_top: int) -> Summary:
    """What the log-probabilities of `tokens` [n] and of the `num_top` likeliest tokens need of
    float32 logits [n, V]."""
    if logits.is_cpu and cpu.available()[0]:
        from quire.kernels.cpu.sampling import summarize as native

        return native(logits, tokens, num_top)
    return summarize_reference(logits, tokens, num_top)


def penalize(logits: Tensor, rows: Tensor, uses: Tensor, settings: PenaltySettings) -> None:
    """Lowers the logits [S, V] of used tokens in the lines whose rows have penalties."""
    if logits.is_cuda:
        from quire.kernels.triton import penalties

        penalties.penalize(logits, rows, uses, settings)
    elif cpu.available()[0]:
        from quire.kernels.cpu.sampling import penalize as native

        native(logits, rows, uses, settings)
    else:
        penalize_reference(logits, rows, uses, settings)


def count_uses(uses: Tensor, rows: Tensor, tokens: Tensor, slots: Tensor) -> None:
    """Counts the use of `tokens[i]` by `rows[i]` where that row has a slot."""
    if uses.is_cuda:
        from quire.kernels.triton import penalties

        penalties.count_uses(uses, rows, tokens, slots)
    else:
        count_uses_reference(uses, rows, tokens, slots)


def apply_bitmask(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    """Forbids in line `lines[i]` of `logits` every token whose bit in `bits[i]` is 0."""
    if logits.is_cuda:
        from quire.kernels.triton.bitmask import apply_bitmask as kernel

        kernel(logits, lines, bits)
    elif logits.dtype == torch.float32 and cpu.available()[0]:
        from quire.kernels.cpu.sampling import apply_bitmask as native

        native(logits, lines, bits)
    else:
        apply_bitmask_reference(logits, lines, bits)
