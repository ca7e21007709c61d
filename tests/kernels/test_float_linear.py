"""The packed linear layer in float32 against torch, for all tails and numbers of threads."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.linear import FLOAT_GROUP, pack_floats, pack_matrices

pytestmark = pytest.mark.usefixtures("native")


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 12, 13, 25, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 5), (33, 64), (129, 100)])
def test_equals_torch(
    outputs: int,
    inputs: int,
    num_tokens: int,
    threads: int,
    isa: str,
    num_threads: None,
    poisoned_memory: None,
) -> None:
    torch.set_num_threads(threads)
    x, weight = torch.randn(num_tokens, inputs), torch.randn(outputs, inputs)
    packed, bias = pack_floats([weight]), torch.randn(outputs)
    expected = x.double() @ weight.double().t()
    found = packed.multiply(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    found = packed.multiply(x, bias)
    torch.testing.assert_close(found.double(), expected + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_computed_with_as_their_numbers(
    dtype: torch.dtype, isa: str, poisoned_memory: None
) -> None:
    """To the bit, subnormal numbers too."""
    weight = (torch.randn(37, 50) * torch.logspace(-7, 2, 50)).to(dtype)
    weight[3, :4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny])
    narrow, wide = pack_floats([weight], dtype=dtype), pack_floats([weight])
    assert narrow.packed.dtype == dtype and 2 * narrow.nbytes == wide.nbytes
    for num_tokens in (1, 13, 30):
        x = torch.randn(num_tokens, 50)
        assert torch.equal(narrow.multiply(x), wide.multiply(x))
    norm = torch.rand(50)
    for one, other in zip(
        narrow.multiply_normal(x, None, norm, 1e-5),
        wide.multiply_normal(x, None, norm, 1e-5),
        strict=True,
    ):
        assert torch.equal(one, other)
    ids = torch.tensor([36, 0, 3])
    assert torch.equal(narrow.rows(ids), weight[ids].float())


def test_strided_input_and_output() -> None:
    """Rows may lie apart, and nothing beside the output is written."""
    wide, weight = torch.randn(5, 100), torch.randn(20, 40)
    out = torch.full((5, 50), 7.0)
    pack_floats([weight]).multiply(wide[:, 30:70], None, out[:, 10:30])
    torch.testing.assert_close(out[:, 10:30], wide[:, 30:70] @ weight.t())
    assert (out[:, :10] == 7).all() and (out[:, 30:] == 7).all()


def test_many_threads_find_work_for_all_groups() -> None:
    """A layer wide enough to be divided among threads, each output computed once."""
    x, weight = torch.randn(30, 256), torch.randn(FLOAT_GROUP * 37 + 5, 256)
    found = pack_floats([weight]).multiply(x)
    torch.testing.assert_close(found, x @ weight.t(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sizes", [(1,), (16, 16), (3, 20, 5), (40, 8, 16, 1)])
def test_shards_are_packed_one_below_the_other(sizes: tuple[int, ...]) -> None:
    shards = [torch.randn(size, 6).bfloat16() for size in sizes]
    packed, joined = pack_floats(shards).packed, torch.cat(shards).float()
    assert torch.equal(packed.transpose(1, 2).reshape(-1, 6)[: len(joined)], joined)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 13, 40])
@pytest.mark.parametrize(("count", "outputs", "inputs"), [(1, 1, 1), (3, 33, 20), (5, 64, 48)])
def test_matrices_with_inputs_of_their_own(
    count: int,
    outputs: int,
    inputs: int,
    num_tokens: int,
    threads: int,
    isa: str,
    num_threads: None,
    poisoned_memory: None,
) -> None:
    """What one multiplies, no other sees: inputs lie apart, and are followed by what is not
    theirs. A token's outputs are to the bit what one matrix alone makes of it alone."""
    torch.set_num_threads(threads)
    wide, weights = torch.randn(num_tokens, count, inputs + 3), torch.randn(count, outputs, inputs)
    x = wide[..., :inputs]
    found = pack_matrices(weights).multiply(x)
    assert found.shape == (num_tokens, count, outputs) and found.is_contiguous()
    for i, weight in enumerate(weights):
        expected = x[:, i].double() @ weight.double().t()
        torch.testing.assert_close(found[:, i].double(), expected, rtol=1e-5, atol=1e-4)
        packed = pack_floats([weight])
        for token in range(num_tokens):
            alone = packed.multiply(x[token : token + 1, i])
            assert torch.equal(found[token : token + 1, i], alone)


def test_inputs_of_another_shape_are_refused() -> None:
    packed = pack_matrices(torch.randn(2, 5, 4))
    for x in (torch.randn(3, 2, 5), torch.randn(3, 1, 4), torch.randn(3, 2, 4).double()):
        with pytest.raises(ValueError, match=r"x must be float32 \[tokens, 2, 4\]; got"):
            packed.multiply(x)
