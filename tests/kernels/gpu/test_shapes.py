"""The Triton backend as models use it, over head sizes, block sizes, types, windows, softcaps,
sinks and kinds of rotation.

Each case runs prompts in chunks beside decoding rows, then decoding alone, with rotation and head
norms, against the plain-torch backend in float64 on the same numbers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.layers.attention import triton as triton_backend  # noqa: E402
from quire.layers.attention.backend import AttentionInputs  # noqa: E402
from quire.layers.attention.layer import QKV, QKNorms, Rotation  # noqa: E402
from quire.layers.attention.torch import TorchBackend  # noqa: E402
from quire.layers.attention.triton import TritonBackend  # noqa: E402
from quire.protocol.kv_spec import BLOCK_SIZES  # noqa: E402
from quire.worker.rows import Staging  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)

HEAD_SIZES = (64, 80, 96, 128, 256)
# The interpreter has no arithmetic in bfloat16.
DTYPES = (torch.float32, torch.bfloat16 if ON_GPU else torch.float16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
GROUPS = ((4, 4), (6, 2), (8, 1))
WINDOW = 21
SOFTCAP = 0.7
# The share of a head that rotates, and whether neighbours do.
ROTATIONS = ((1.0, False), (0.75, False), (0.5, True))

# Every head size with every block size, with every type, and with every type in a window.
CASES = [
    (
        *(
            head_dim,
            size,
            DTYPES[(h + b) % 3],
            WINDOW if b >= 3 else None,
            GROUPS[(h + b // 2) % 3],
        ),
        ROTATIONS[(h + b) % 3],
        SOFTCAP if (h + b // 3) % 2 else None,
        (h + b // 3) % 2 == 0 or h == 4,
    )
    for h, head_dim in enumerate(HEAD_SIZES)
    for b, size in enumerate(BLOCK_SIZES)
]
if not ON_GPU:  # slow there
    CASES = [CASES[6 * h + b] for h, b in enumerate((0, 1, 5, 3, 4))]

# New tokens of each of three requests, step by step.
STEPS = ((30, 5, 0), (1, 1, 17), (1, 1, 1))


class Paged:
    """Keys and values of one layer in shuffled blocks, NaN where nothing was written."""

    def __init__(self, head_dim: int, size: int, kv_heads: int) -> None:
        self.size = size
        self.computed = [0, 0, 0]
        width = -(-sum(map(max, zip(*STEPS, strict=True))) // size) + 1
        order = torch.randperm(3 * width + 2, generator=torch.Generator().manual_seed(size))
        self.tables = order[: 3 * width].view(3, width).int()
        shape = (1, 2, 3 * width + 2, kv_heads, size, head_dim)
        self.empty = torch.full(shape, torch.nan, dtype=torch.float64)

    def advance(self, new: tuple[int, ...]) -> tuple[AttentionInputs, Tensor]:
        """The inputs of a step that computes `new` tokens, and the tokens' positions."""
        rows = [row for row, count in enumerate(new) if count]
        pairs = [
            (row, position)
            for row in rows
            for position in range(self.computed[row], self.computed[row] + new[row])
        ]
        slots = [int(self.tables[r, p // self.size]) * self.size + p % self.size for r, p in pairs]
        for row in rows:
            self.computed[row] += new[row]
        lens = [new[row] for row in rows]
        inputs = AttentionInputs(
            query_start=torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32, device=DEVICE),
            context_lens=torch.tensor(
                [self.computed[row] for row in rows], dtype=torch.int32, device=DEVICE
            ),
            block_tables=self.tables[rows].to(DEVICE),
            slots=torch.tensor(slots, device=DEVICE),
            query_lens=np.array(lens, np.int32),
            send=Staging(DEVICE).send,
        )
        return inputs, torch.tensor([position for _, position in pairs], device=DEVICE)


def make_qkv(
    count: int,
    dims: tuple[int, int, int],
    dtype: torch.dtype,
    positions: Tensor,
    with_norms: bool,
    rotated: tuple[float, bool],
) -> QKV:
    """Random projections of `count` tokens as views of one tensor, as a model's are."""
    num_heads, kv_heads, head_dim = dims
    generator = torch.Generator().manual_seed(count)
    joined = torch.randn(count, num_heads + 2 * kv_heads, head_dim, generator=generator)
    share, interleaved = rotated
    angles = torch.randn(64, int(head_dim * share) // 2, generator=generator).to(DEVICE)
    rotation = Rotation(angles.cos(), angles.sin(), positions, interleaved)
    norms = None
    if with_norms:
        weights = (1 + 0.1 * torch.randn(2, head_dim, generator=generator)).to(DEVICE, dtype)
        norms = QKNorms(weights[0], weights[1], 1e-6)
    q, k, v = joined.to(DEVICE, dtype).split([num_heads, kv_heads, kv_heads], 1)
    return QKV(q, k, v, rotation, norms)


def in_double(qkv: QKV) -> QKV:
    """What the kernels are given, rotated and normalised by the references, then widened."""
    return QKV(*(tensor.double() for tensor in qkv.prepared()))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}-{c[3]}".lower())
def test_steps_match_plain_torch(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # each program takes the interpreter a while
        monkeypatch.setattr(triton_backend, "PROGRAMS_WANTED", 16)
    head_dim, size, dtype, window, (num_heads, kv_heads), rotated, softcap, has_sinks = case
    sinks = 2 * torch.randn(num_heads, device=DEVICE) if has_sinks else None
    paged = Paged(head_dim, size, kv_heads)
    found_kv = paged.empty.to(DEVICE, dtype)
    expected_kv = paged.empty.to(DEVICE)
    found = TritonBackend(found_kv, num_heads, kv_heads, head_dim, size)
    expected = TorchBackend(expected_kv, num_heads, kv_heads, head_dim, size)
    for number, new in enumerate(STEPS):
        inputs, positions = paged.advance(new)
        dims = (num_heads, kv_heads, head_dim)
        qkv = make_qkv(sum(new), dims, dtype, positions, head_dim % 128 == 0, rotated)
        scale = head_dim**-0.5
        wanted = expected.plan(inputs).attend(0, in_double(qkv), scale, window, softcap, sinks)
        out = found.plan(inputs).attend(0, qkv, scale, window, softcap, sinks)
        assert torch.isfinite(out).all()
        error = (out.double() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE[dtype], f"step {number}: relative error {error:.1e}"
    written = ~expected_kv.isnan()
    assert torch.equal(~found_kv.isnan(), written), "only the slots of the steps are written"
    error = (found_kv.double() - expected_kv)[written].norm() / expected_kv[written].norm()
    assert error < TOLERANCE[dtype]
