"""Mixtures of experts in the native library, next to their references.

A change that pairs a token with another's expert, loses a tail of outputs, inputs or tokens, adds
up in another order for another batch, or chooses an expert twice turns these red.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.config.experts import ClampedGate, ExpertsConfig
from quire.kernels import cpu
from quire.kernels.cpu import experts as native_kernel
from quire.kernels.cpu import linear as packed
from quire.kernels.cpu.experts import NativeExperts, route, sigmoid
from quire.kernels.cpu.quantized import pack_weights
from quire.kernels.torch import experts as reference
from quire.kernels.torch.experts import Routing
from quire.kernels.torch.quantize import to_fp8, to_groups
from quire.kernels.torch.quantized_weights import E2M1, GroupedWeights, InputRounding
from quire.layers.weights import Matrix

pytestmark = pytest.mark.usefixtures("native")
NUM_EXPERTS, TOP_K, HIDDEN, WIDTH = 7, 3, 64, 96


def _mxfp4(weight: Tensor) -> Matrix:
    """The nearest of E2M1's values, with a power of 2 for each 32 inputs."""
    by_group = weight.unflatten(1, (-1, 32))
    scales = torch.exp2((by_group.abs().amax(-1) / 6).log2().ceil())
    values = torch.tensor([*E2M1, *(-one for one in E2M1)])
    distances = (by_group / scales.unsqueeze(-1)).unsqueeze(-1) - values
    codes = distances.abs().argmin(-1).flatten(1).to(torch.uint8)
    return pack_weights(GroupedWeights(codes, 4, scales, 32, is_e2m1=True))


def _q4_1(weight: Tensor) -> Matrix:
    """Blocks of random numbers, with scales that give weights of the usual size."""
    num_outputs, num_inputs = weight.shape
    blocks = torch.randint(0, 256, (weight.numel() // 32, 20), dtype=torch.uint8)
    scales = torch.rand(len(blocks), 1) * 0.02
    blocks[:, :2], blocks[:, 2:4] = (one.half().view(torch.uint8) for one in (scales, scales * -7))
    return packed.pack_blocks("Q4_1", blocks.view(num_outputs, -1), num_inputs)


def _ordered_groups(weight: Tensor) -> Matrix:
    order = torch.randperm(weight.shape[1]).int()
    return pack_weights(replace(to_groups(weight, group_size=32), order=order))


def _fp8(weight: Tensor) -> Matrix:
    return pack_weights(replace(to_fp8(weight), rounding=InputRounding(torch.float8_e4m3fn)))


def _halves(dtype: torch.dtype) -> Callable[[Tensor], Matrix]:
    return lambda weight: packed.pack_floats([weight.to(dtype)], dtype=dtype)


FORMATS: dict[str, Callable[[Tensor], Matrix]] = {
    "float32": lambda weight: packed.pack_floats([weight]),
    "float16": _halves(torch.float16),
    "bfloat16": _halves(torch.bfloat16),
    "int8": packed.quantize_int8,
    "groups": lambda weight: pack_weights(to_groups(weight, group_size=32)),
    "ordered groups": _ordered_groups,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "Q4_1": _q4_1,
}


class Mixture:
    """Random experts, and what each of them is by its own matrices."""

    def __init__(self, formats: Sequence[str], inner: int = WIDTH, biased: bool = False) -> None:
        torch.manual_seed(len(formats) + inner)
        self.gate_up = self._pack(formats, 2 * inner, HIDDEN)
        self.down = self._pack(formats, HIDDEN, inner)
        self.biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if biased:
            self.biases = torch.randn(NUM_EXPERTS, 2 * inner), torch.randn(NUM_EXPERTS, HIDDEN)

    def _pack(self, formats: Sequence[str], outputs: int, inputs: int) -> list[Matrix]:
        return [
            FORMATS[formats[expert % len(formats)]](torch.randn(outputs, inputs) / inputs**0.5)
            for expert in range(NUM_EXPERTS)
        ]

    def native(self, kept: range = range(NUM_EXPERTS), limit: float | None = None) -> NativeExperts:
        gate_up, down = (
            [matrices[expert].handle for expert in kept] for matrices in (self.gate_up, self.down)
        )
        biases = (None if bias is None else bias[kept.start : kept.stop] for bias in self.biases)
        return NativeExperts(
            [one for one in gate_up if one is not None],
            [one for one in down if one is not None],
            kept.start,
            *biases,
            gate=ClampedGate(limit, 1.702) if limit else None,
        )

    def exact(
        self, x: Tensor, routing: Routing, kept: range = range(NUM_EXPERTS), limit: float = 0.0
    ) -> Tensor:
        """The sum in float64, with each expert's two products as its matrices give them alone."""
        out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
        for token, (chosen, weights) in enumerate(zip(*routing, strict=True)):
            for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
                if expert in kept:
                    out[token] += weight * self._one(x[token : token + 1], expert, limit)
        return out

    def _one(self, x: Tensor, expert: int, limit: float) -> Tensor:
        wide, narrow = (None if bias is None else bias[expert] for bias in self.biases)
        gate, up = self.gate_up[expert].multiply(x, wide, None).double().chunk(2, -1)
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * (1.702 * gate).sigmoid() * (up + 1)
        else:
            inner = gate * gate.sigmoid() * up
        return self.down[expert].multiply(inner.float(), narrow, None)[0].double()


def random_routing(num_tokens: int, num_experts: int = NUM_EXPERTS) -> Routing:
    chosen = torch.rand(num_tokens, num_experts).topk(TOP_K).indices.int()
    return Routing(chosen, torch.rand(num_tokens, TOP_K))


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error}"


@pytest.mark.parametrize(("threads", "num_tokens"), [(1, 1), (8, 1), (3, 25)])
@pytest.mark.parametrize("name", [*FORMATS, "all"])
def test_equals_the_matrices_of_each_expert(
    name: str, threads: int, num_tokens: int, isa: str, num_threads: None, poisoned_memory: None
) -> None:
    torch.set_num_threads(threads)
    mixture = Mixture(tuple(FORMATS) if name == "all" else (name,))
    x, routing = torch.randn(num_tokens, HIDDEN), random_routing(num_tokens)
    # What is rounded to 8 bits may turn by rounding before it.
    assert_near(mixture.native().run(x, routing), mixture.exact(x, routing), 2e-3)


@pytest.mark.parametrize("inner", [1, 17, 40])
def test_equals_the_reference(inner: int, isa: str, poisoned_memory: None) -> None:
    """Widths that fill no group of outputs, and a strided input."""
    torch.manual_seed(inner)
    gate_up, down = torch.randn(NUM_EXPERTS, 2 * inner, 45), torch.randn(NUM_EXPERTS, 45, inner)
    matrices = [[packed.pack_floats([one]) for one in stack] for stack in (gate_up, down)]
    experts = NativeExperts(*([one.handle for one in side] for side in matrices))
    for num_tokens in (0, 1, 29):
        x, routing = torch.randn(num_tokens, 50)[:, :45], random_routing(num_tokens)
        found = experts.run(x, routing)
        expected = reference.expert_mlp(x, routing, gate_up, down)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept", [range(2, 5), range(6, 7), range(0, 1)])
def test_experts_of_other_ranks_are_left_out(kept: range, isa: str) -> None:
    mixture = Mixture(["float32"])
    x, routing = torch.randn(23, HIDDEN), random_routing(23)
    found = mixture.native(kept).run(x, routing)
    torch.testing.assert_close(
        found.double(), mixture.exact(x, routing, kept), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_biases_and_the_limited_gate(limit: float, isa: str) -> None:
    mixture = Mixture(["float32"], inner=33, biased=True)
    x, routing = torch.randn(9, HIDDEN), random_routing(9)
    found = mixture.native(limit=limit).run(x, routing)
    expected = mixture.exact(x, routing, limit=limit)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_is_the_same_alone_and_in_a_batch(name: str, isa: str, num_threads: None) -> None:
    """To the bit, also beyond the tokens that are taken at once."""
    mixture = Mixture([name], inner=32)
    experts, num_tokens = mixture.native(), 3000
    x, routing = torch.randn(num_tokens, HIDDEN), random_routing(num_tokens)
    torch.set_num_threads(3)
    together = experts.run(x, routing)
    torch.set_num_threads(1)
    for part in (slice(0, 1), slice(1234, 1251), slice(2725, 2740), slice(2999, 3000)):
        alone = experts.run(x[part], Routing(routing.experts[part], routing.weights[part]))
        assert torch.equal(alone, together[part])


UNUSED = """
import torch
from quire.kernels.cpu.experts import NativeExperts
from quire.kernels.cpu.linear import pack_floats
from quire.kernels.torch.experts import Routing

pairs = [[pack_floats([torch.randn(outputs, 32)]) for outputs in (64, 32)] for _ in range(5)]
experts = NativeExperts(*([one.handle for one in side] for side in zip(*pairs)))
chosen = torch.tensor([[1, 3], [3, 1], [1, 3]]).int()
x, routing = torch.randn(3, 32), Routing(chosen, torch.rand(3, 2))
expected = experts.run(x, routing)
for expert in (0, 2, 4):
    experts._gate_up[expert].data = experts._down[expert].data = 8
assert torch.equal(experts.run(x, routing), expected)
print("done", flush=True)
experts._down[3].data = 8
experts.run(x, routing)
"""


def test_only_the_experts_in_use_are_read() -> None:
    """To read where there is no memory ends the process: not for experts that no token has
    chosen, but for one that some have."""
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
    assert done.returncode < 0


def test_refuses_what_it_would_read_wrongly() -> None:
    mixture = Mixture(["float32"])
    experts, x, routing = mixture.native(), torch.randn(2, HIDDEN), random_routing(2)
    with pytest.raises(ValueError, match="int32"):
        experts.run(x, Routing(routing.experts.long(), routing.weights))
    with pytest.raises(ValueError, match=r"\[3, top_k\]"):
        experts.run(torch.randn(3, HIDDEN), routing)
    with pytest.raises(ValueError, match="float32"):
        experts.run(x.double(), routing)
    one, other = (packed.pack_floats([torch.randn(8, width)]) for width in (4, 5))
    with pytest.raises(ValueError, match="alike"):
        NativeExperts([one.handle], [other.handle])


SOFTMAX = ExpertsConfig(24, 5, 8, (True,))
CHOICES = {
    "softmax": SOFTMAX,
    "softmax, as it is": replace(SOFTMAX, normalizes=False, factor=2.5),
    "softmax in groups": replace(SOFTMAX, num_groups=6, top_groups=2),
    "softmax of chosen": replace(SOFTMAX, scoring="softmax_of_chosen"),
    "sigmoid": replace(SOFTMAX, scoring="sigmoid", factor=1.5),
    "sigmoid in groups": replace(SOFTMAX, scoring="sigmoid", num_groups=4, top_groups=2),
    "groups of one": replace(SOFTMAX, scoring="sigmoid", num_groups=24, top_groups=7),
    "one of many": replace(SOFTMAX, count=300, top_k=1),
    "all": replace(SOFTMAX, count=3, top_k=3),
}


def by_reference(logits: Tensor, config: ExpertsConfig, bias: Tensor | None) -> Routing:
    groups = config.num_groups, config.top_groups
    if config.scoring == "sigmoid":
        assert bias is not None
        found = reference.sigmoid_in_groups(
            logits, bias, config.top_k, *groups, normalizes=config.normalizes
        )
    elif config.scoring == "softmax_of_chosen":
        found = reference.top_k_then_softmax(logits, config.top_k)
    elif config.num_groups > 1:
        found = reference.softmax_in_groups(logits, config.top_k, *groups, config.normalizes)
    else:
        found = reference.softmax_then_top_k(logits, config.top_k, config.normalizes)
    return Routing(found.experts, found.weights * config.factor)


@pytest.mark.parametrize("choice", CHOICES)
def test_routes_as_the_reference(
    choice: str, isa: str, num_threads: None, poisoned_memory: None
) -> None:
    config = CHOICES[choice]
    torch.manual_seed(config.count)
    bias = torch.randn(config.count) * 0.3 if config.scoring == "sigmoid" else None
    for num_tokens, threads in ((0, 1), (1, 1), (700, 3)):
        torch.set_num_threads(threads)
        logits = torch.randn(num_tokens, config.count + 1)[:, :-1] * 2
        found, expected = route(logits, config, bias), by_reference(logits, config, bias)
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-7)
        for token in range(0, num_tokens, 333):
            alone = route(logits[token : token + 1], config, bias)
            assert torch.equal(alone.weights[0], found.weights[token])


@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_no_logits_make_an_expert_be_chosen_twice(scoring: str) -> None:
    """Equal ones, of which the first are chosen, infinite ones and NaN."""
    config = replace(SOFTMAX, scoring=scoring)  # type: ignore[arg-type]
    bias = torch.zeros(config.count) if scoring == "sigmoid" else None
    logits = torch.zeros(5, config.count)
    logits[0, 3] = -0.0
    logits[1], logits[2] = -torch.inf, torch.nan
    logits[3, ::2], logits[4, 1] = -torch.inf, torch.nan
    found = route(logits, config, bias)
    assert found.experts[0].tolist() == [0, 1, 2, 3, 4]
    assert found.experts[3].tolist() == [1, 3, 5, 7, 9]
    assert all(len(set(chosen)) == config.top_k for chosen in found.experts.tolist())
    assert found.experts.min() >= 0 and found.experts.max() < config.count


def test_a_sigmoid_is_the_same_wherever_it_is(isa: str) -> None:
    x = torch.randn(601, 1) * 20
    found = sigmoid(x)
    torch.testing.assert_close(found, x.sigmoid(), rtol=1e-5, atol=0)
    assert torch.equal(torch.cat([sigmoid(one) for one in x.split(1)]), found)


def test_the_library_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers call it where it is there, and references where it is not."""
    from quire.kernels import dispatch

    logits = torch.randn(4, SOFTMAX.count)
    calls = []
    monkeypatch.setattr(native_kernel, "route", lambda *given: calls.append(given))
    dispatch.route(logits, SOFTMAX)
    assert len(calls) == 1
    monkeypatch.setattr(cpu, "available", lambda: (False, "not built"))
    assert dispatch.route(logits, SOFTMAX).experts.shape == (4, SOFTMAX.top_k)
    assert len(calls) == 1
