"""Adapters by Triton kernels against the plain-torch reference: on the GPU, or by Triton's
interpreter.

Rank rows of another adapter, chunks in another order, a slice that an adapter leaves alone, and
tokens that are lost between tiles turn these red.
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.adapter_pool import AdapterTokens, LayerAdapters  # noqa: E402
from quire.kernels.torch import lora as reference  # noqa: E402
from quire.kernels.triton import lora  # noqa: E402
from tests.kernels.test_lora import WIDTHS, random_layer, random_tokens  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


@pytest.mark.parametrize(
    ("count", "num_inputs", "dtype", "has_bias"),
    [
        (1, 64, torch.float32, True),
        (3, 300, torch.float16, False),
        (30, 64, torch.float16, True),
        (30, 37, torch.float32, False),
        (300, 48, torch.float32, True),
        (0, 64, torch.float32, True),
    ],
)
def test_add_adapters(count: int, num_inputs: int, dtype: torch.dtype, has_bias: bool) -> None:
    layer = random_layer(num_inputs, dtype, DEVICE)
    x, out, bias, slots = (one.to(DEVICE) for one in random_tokens(count, num_inputs))
    x, out, bias = x.to(dtype), out.to(dtype), bias.to(dtype)
    expected, before = out.clone(), out.clone()
    own_bias = bias if has_bias else None
    reference.add_adapters(x, expected, own_bias, layer, AdapterTokens(slots))
    tokens = AdapterTokens(slots, lora.tiles_by_adapter(slots, len(layer.pool.tables)))
    lora.add_adapters(x, out, own_bias, layer, tokens)
    bound = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, expected, atol=bound * 10, rtol=bound)
    assert torch.equal(out[slots < 0], before[slots < 0])


def test_columns_of_a_wider_tensor() -> None:
    layer = random_layer(64, device=DEVICE)
    x, out, bias, slots = (one.to(DEVICE) for one in random_tokens(20, 64))
    wide_x, wide_out = torch.randn(20, 90, device=DEVICE), torch.zeros(20, 200, device=DEVICE)
    wide_x[:, 10:74], wide_out[:, 50 : 50 + sum(WIDTHS)] = x, out
    reference.add_adapters(x, out, bias, layer, AdapterTokens(slots))
    tokens = AdapterTokens(slots, lora.tiles_by_adapter(slots, 4))
    lora.add_adapters(wide_x[:, 10:74], wide_out[:, 50 : 50 + sum(WIDTHS)], bias, layer, tokens)
    found = wide_out[:, 50 : 50 + sum(WIDTHS)]
    torch.testing.assert_close(found, out, atol=1e-4, rtol=1e-4)
    assert wide_out.count_nonzero() == out.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_to_embedding(dtype: torch.dtype) -> None:
    whole = random_layer(70, dtype, DEVICE)
    layer = LayerAdapters.of(whole.pool, whole.slices[:1])
    _, out, _, slots = (one.to(DEVICE) for one in random_tokens(30, 70))
    out = out[:, : WIDTHS[0]].to(dtype).contiguous()
    ids = torch.arange(30, device=DEVICE) * 2
    expected = out.clone()
    reference.add_to_embedding(ids, expected, layer, AdapterTokens(slots))
    lora.add_to_embedding(ids, out, layer, AdapterTokens(slots))
    torch.testing.assert_close(out, expected, atol=2e-2 if dtype != torch.float32 else 1e-4, rtol=0)
