"""The cases of `benchmarks/kernels.py` call the kernels rightly: all equal their references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


def sparse(count: int, top_k: int, width: int) -> Any:
    from harness import Sparse  # found once a test has the folder on its path

    return Sparse(count, top_k, width, {})


CASES: dict[str, Callable[[Any], Any]] = {
    "decode attention": lambda cases: cases.attention(2, 1, 40),
    "decode attention, 8-bit cache": lambda cases: cases.attention(2, 1, 40, float8=True),
    "shared-prefix attention": lambda cases: cases.attention(4, 1, 40, shared=32),
    "attention with drafts": lambda cases: cases.attention(2, 3, 40, decode_queries=3),
    "attention with drafts, in prefill tiles": lambda cases: cases.attention(1, 3, 40),
    "prefill attention": lambda cases: cases.attention(1, 20, 40),
    "prefill attention, 8-bit cache": lambda cases: cases.attention(1, 20, 40, float8=True),
    "prompt attention": lambda cases: cases.attention(2, 20, 20),
    "latent attention": lambda cases: cases.latent_attention(2, 1, 40, 4),
    "latent attention with drafts": lambda cases: cases.latent_attention(1, 3, 40, 4, 3),
    "latent attention of prompts, absorbed": lambda cases: cases.latent_attention(1, 9, 20, 2),
    "latent attention of prompts": lambda cases: cases.latent_attention(1, 172, 180, 1, 1, True),
    "rotation and cache write": lambda cases: cases.rotation_and_write(3),
    "norm with residual": lambda cases: cases.norm_with_residual(2),
    "gated activation": lambda cases: cases.gated_activation(1),
    "linear of one token": lambda cases: cases.linear(1, 40, 100),
    "norm and linear of one token": lambda cases: cases.fused_linear(40, 100, gated=True),
    "linear of a batch": lambda cases: cases.linear(3, 40, 100),
    "embedding": lambda cases: cases.embedding(3, vocab=50),
    "router": lambda cases: cases.routing(sparse(16, 3, 8), 3),
    "experts": lambda cases: cases.experts(sparse(4, 2, 40), 64, 6),
    "sampling": lambda cases: cases.sampling(cases.FILTERED, 20, vocab=300),
    "greedy sampling": lambda cases: cases.sampling(cases.GREEDY, 20, vocab=300),
    "sampling with temperature": lambda cases: cases.sampling(cases.DRAWN, 20, vocab=300),
    "gather the batch": lambda cases: cases.gathering(5),
    "append tokens": lambda cases: cases.appending(5),
}


@pytest.fixture
def kernel_cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package as the script imports it, with few copies of the inputs and few programs."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import kernel_cases
    import kernel_cases.case
    from quire.layers.attention import mla
    from quire.layers.attention import triton as triton_backend

    monkeypatch.setattr(mla, "PROGRAMS_WANTED", 8)
    monkeypatch.setattr(mla, "MAX_CHUNK", 1 << 8)
    monkeypatch.setattr(kernel_cases.case, "MAX_COPIES", 2)
    monkeypatch.setattr(triton_backend, "PROGRAMS_WANTED", 32)
    return kernel_cases


@pytest.mark.parametrize("name", CASES)
def test_case_agrees_with_its_reference(name: str, kernel_cases: Any) -> None:
    """A kernel whose arguments change must not be timed on something else."""
    sides = CASES[name](kernel_cases).make()
    assert len(sides.ours) == len(sides.torchs) == 2
    sides.check()
    sides.torchs[1]()


def test_every_kernel_has_a_small_case(kernel_cases: Any) -> None:
    assert set(kernel_cases.KERNELS) <= set(CASES)
