"""Routers in bfloat16 against those of transformers, which computes the logits of some families in
float32: a rounding of them sends tokens to other experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.model import load_model_config
from quire.kernels import dispatch
from quire.kernels.torch.experts import Routing
from quire.layers.experts import Router
from quire.models.loader import load_model
from quire.models.registry import CausalLM
from tests.models.reference import random_model, save_safetensors

EXACT = ("deepseek_v2", "deepseek_v3", "glm4_moe")


def routed(
    model: CausalLM, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Router, Tensor, Routing]:
    """The model's last router, its logits of x, and what it chooses."""
    seen: list[Tensor] = []
    route = dispatch.route

    def see(logits: Tensor, *others: object) -> Routing:
        seen.append(logits)
        return route(logits, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(dispatch, "route", see)
    router = [module for module in model.modules() if isinstance(module, Router)][-1]
    routing = router(x)
    (logits,) = seen
    return router, logits, routing


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("family", [*EXACT, "qwen3_moe"])
def test_logits_are_rounded_as_by_transformers(
    family: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside quantised experts, where the router is kept as floats."""
    reference = random_model(family).bfloat16()
    save_safetensors(reference, tmp_path)
    config = load_model_config(str(tmp_path))
    model = load_model(config, dtype=torch.bfloat16, device="cpu", quantization=quantization)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    router, logits, routing = routed(model, x, monkeypatch)
    weight = reference.get_parameter(f"{router.path}.weight").detach()
    exact = F.linear(x.double(), weight.double())
    error = float((logits - exact).norm() / exact.norm())
    if family in EXACT:
        assert logits.dtype == torch.float32 and error < 1e-6
        chosen = exact.float()
    else:
        assert logits.dtype == torch.bfloat16 and error < 3e-3
        chosen = F.linear(x, weight)
    bias = router.e_score_correction_bias
    expected = dispatch.route(chosen, router.config, bias)
    assert torch.equal(routing.experts, expected.experts)
    assert torch.allclose(routing.weights, expected.weights, rtol=1e-5, atol=1e-6)
