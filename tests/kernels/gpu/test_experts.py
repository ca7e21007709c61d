"""Routers and experts against their plain-torch references: on the GPU, or by Triton's interpreter.

An expert that is chosen twice or not in its turn, a pair that is lost between tiles, weights of
another expert, block or gate, and results of experts of other ranks turn these red.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.config.experts import ClampedGate, ExpertsConfig  # noqa: E402
from quire.kernels import dispatch  # noqa: E402
from quire.kernels.expert_matrices import ExpertMatrices  # noqa: E402
from quire.kernels.torch import experts as references  # noqa: E402
from quire.kernels.torch.experts import Routing  # noqa: E402
from quire.kernels.torch.quantized_weights import (  # noqa: E402
    GroupedWeights,
    QuantizedWeights,
    ReferenceMatrix,
    ScaledWeights,
)
from quire.kernels.triton import expert_tiles, experts, routing  # noqa: E402
from quire.kernels.triton.experts import DenseExperts  # noqa: E402
from quire.kernels.triton.gemv import gemv  # noqa: E402
from quire.kernels.triton.grouped_matrix import pack_grouped  # noqa: E402
from quire.kernels.triton.scaled_linear import ScaledMatrix  # noqa: E402
from quire.layers.experts import Experts  # noqa: E402
from quire.layers.parallel import Parallel  # noqa: E402
from quire.layers.quantization import packed as packed_layers  # noqa: E402
from quire.layers.quantization.matrices import DenseMatrix, stack_experts  # noqa: E402
from quire.layers.quantization.packed import Packed, PackRounded  # noqa: E402
from quire.layers.quantization.unquantized import Unquantized  # noqa: E402
from quire.layers.weights import Build  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter has no arithmetic in bfloat16.
HALF = torch.bfloat16 if ON_GPU else torch.float16
BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
"""Of the error in norm: results of gates and of experts are rounded on the way."""

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a millisecond for each."""
    if not ON_GPU:
        tile = experts._Tile(32, 64, 1, 1)
        monkeypatch.setattr(experts, "_gate_tile", lambda: tile)
        monkeypatch.setattr(experts, "_sum_tile", lambda _: tile)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def check(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error <= BOUND[found.dtype], f"relative error {error:.1e}"


# --- routers --------------------------------------------------------------------------------------

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"count": 60, "top_k": 4},
    "softmax, not normalised": {"count": 128, "top_k": 8, "normalizes": False},
    "softmax of chosen": {"count": 40, "top_k": 3, "scoring": "softmax_of_chosen"},
    "softmax in groups": {
        "count": 160,
        "top_k": 6,
        "num_groups": 8,
        "top_groups": 3,
        "normalizes": False,
        "factor": 16.0,
    },
    "sigmoid": {"count": 24, "top_k": 5, "scoring": "sigmoid", "factor": 1.5},
    "sigmoid in groups": {
        "count": 256,
        "top_k": 8,
        "scoring": "sigmoid",
        "num_groups": 8,
        "top_groups": 4,
        "factor": 2.5,
    },
    "sigmoid, not normalised": {
        "count": 12,
        "top_k": 2,
        "scoring": "sigmoid",
        "num_groups": 4,
        "top_groups": 2,
        "normalizes": False,
    },
    "many": {"count": 512, "top_k": 16, "num_groups": 4, "top_groups": 4},
}


def router(name: str) -> ExpertsConfig:
    return ExpertsConfig(intermediate_size=8, is_sparse=(True,), **ROUTERS[name])


def route_reference(logits: Tensor, config: ExpertsConfig, bias: Tensor | None) -> Routing:
    """On the host, where nothing else than the references routes."""
    groups = config.num_groups, config.top_groups
    if config.scoring == "sigmoid":
        assert bias is not None
        found = references.sigmoid_in_groups(logits, bias, config.top_k, *groups, config.normalizes)
    elif config.scoring == "softmax_of_chosen":
        found = references.top_k_then_softmax(logits, config.top_k)
    else:
        found = references.softmax_in_groups(logits, config.top_k, *groups, config.normalizes)
    return Routing(found.experts, found.weights * config.factor)


@pytest.mark.parametrize("name", ROUTERS)
def test_router_equals_its_reference(name: str) -> None:
    config = router(name)
    logits = random(7, config.count)
    bias = random(config.count) / 10 if config.scoring == "sigmoid" else None
    expected = route_reference(logits, config, bias)
    found = routing.route(logits, config, bias)
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights)
    half = routing.route(logits.to(HALF), config, bias)
    expected = route_reference(logits.to(HALF), config, bias)
    torch.testing.assert_close(half.weights, expected.weights)


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits = torch.zeros(2, 40, device=DEVICE)
    logits[1, 7] = 1
    found = routing.route(logits, ExpertsConfig(40, 3, 8, (True,)))
    assert found.experts.tolist() == [[0, 1, 2], [7, 0, 1]]


def test_whatever_the_logits_are_experts_are_distinct() -> None:
    """Tokens that pad a CUDA graph are computed from memory that holds anything."""
    logits = torch.full((3, 24), float("nan"), device=DEVICE)
    logits[1], logits[2, :5] = float("-inf"), 3.0
    for name in ("softmax", "sigmoid"):
        config = ExpertsConfig(24, 6, 8, (True,), name, num_groups=3, top_groups=2)  # type: ignore[arg-type]
        found = routing.route(logits, config, torch.zeros(24, device=DEVICE))
        for line in found.experts.tolist():
            assert len(set(line)) == 6 and all(0 <= one < 24 for one in line)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_logits_are_float32_of_activations_of_16_bits(num_tokens: int) -> None:
    x, weight = random(num_tokens, 96, dtype=HALF), random(24, 96, dtype=HALF)
    found = torch.full((num_tokens, 24), torch.nan, device=DEVICE)
    if num_tokens == 1 and not ON_GPU:
        gemv(x, weight, out=found)
    else:
        dispatch.linear(x, weight, out=found)
    check(found, (x.double() @ weight.double().t()).float())


# --- tiles ----------------------------------------------------------------------------------------


def chosen_experts(num_tokens: int, count: int, top_k: int) -> Tensor:
    """Uneven: most tokens choose among few experts."""
    scores = torch.randn(num_tokens, count) + torch.linspace(3, 0, count)
    return scores.topk(top_k).indices.int().to(DEVICE)


@pytest.mark.parametrize(
    ("num_tokens", "count", "top_k", "first", "kept", "size"),
    [
        (5, 8, 2, 0, 8, 16),
        (70, 8, 3, 2, 5, 16),
        (300, 6, 2, 0, 6, 64),  # more than one tile for some, none for others
        (2600, 5, 2, 1, 3, 32),  # counted by a kernel of its own
    ],
)
def test_each_pair_lies_in_one_tile_of_its_expert(
    num_tokens: int, count: int, top_k: int, first: int, kept: int, size: int
) -> None:
    chosen = chosen_experts(num_tokens, count, top_k)
    tiles = expert_tiles.tiles_by_expert(chosen, kept, first, size)
    found: list[tuple[int, int]] = []
    for expert, start, end in tiles.tiles.t().tolist():
        if expert >= 0:
            assert 0 < end - start <= size
            assert tiles.pairs is not None
            found += [(expert + first, pair) for pair in tiles.pairs[start:end].tolist()]
    pairs = enumerate(chosen.flatten().tolist())
    assert found == sorted((e, pair) for pair, e in pairs if first <= e < first + kept)


# --- networks -------------------------------------------------------------------------------------

HIDDEN, WIDTH, COUNT, TOP_K = 96, 40, 6, 3


def network(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    first: int = 0,
    gate: ClampedGate | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Token by token and expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    gate_up, down, wide = gate_up.double(), down.double(), x.double()
    for token, chosen in enumerate(routing.experts.tolist()):
        for slot, number in enumerate(chosen):
            expert = number - first
            if not 0 <= expert < len(gate_up):
                continue
            gates, up = (F.linear(wide[token], gate_up[expert])).chunk(2)
            if biases is not None:
                gates, up = gates + biases[0][expert][:WIDTH], up + biases[0][expert][WIDTH:]
            if gate is None:
                inner = F.silu(gates) * up
            else:
                gates, up = gates.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
                inner = gates * torch.sigmoid(gate.slope * gates) * (up + 1)
            result = F.linear(inner, down[expert])
            if biases is not None:
                result = result + biases[1][expert]
            out[token] += routing.weights[token, slot].double() * result
    return out.to(x.dtype)


def random_routing(num_tokens: int, count: int = COUNT, top_k: int = TOP_K) -> Routing:
    weights = torch.rand(num_tokens, top_k, device=DEVICE)
    return Routing(chosen_experts(num_tokens, count, top_k), weights)


def float_weights(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = random(count, 2 * WIDTH, HIDDEN, dtype=dtype) / HIDDEN**0.5
    return gate_up, random(count, HIDDEN, WIDTH, dtype=dtype) / WIDTH**0.5


def test_reference_is_what_each_token_gets() -> None:
    gate_up, down = float_weights(COUNT, torch.float32)
    x, chosen = random(9, HIDDEN), random_routing(9)
    check(references.expert_mlp(x, chosen, gate_up, down), network(x, chosen, gate_up, down))


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [(1, HALF), (3, torch.float32), (5, HALF), (60, torch.float32)]
)
def test_float_experts(num_tokens: int, dtype: torch.dtype) -> None:
    """One token, a few, tiles of 16 and of 64 pairs."""
    gate_up, down = float_weights(COUNT, dtype)
    x, chosen = random(num_tokens, HIDDEN, dtype=dtype), random_routing(num_tokens)
    found = experts.expert_mlp(x, chosen, gate_up, down)
    check(found, network(x, chosen, gate_up, down))


def test_large_tiles() -> None:
    gate_up, down = float_weights(2, HALF)
    x, chosen = random(150, HIDDEN, dtype=HALF), random_routing(150, 2, 2)
    assert experts.tile_size(300, 2) == 128
    check(experts.expert_mlp(x, chosen, gate_up, down), network(x, chosen, gate_up, down))


@pytest.mark.parametrize("num_tokens", [2, 12])
def test_experts_of_other_ranks_are_left_out(num_tokens: int) -> None:
    gate_up, down = float_weights(3, torch.float32)
    x, chosen = random(num_tokens, HIDDEN), random_routing(num_tokens)
    # A token that chose none of these gets nothing.
    chosen.experts[0] = torch.tensor([0, 1, 5], device=DEVICE)
    found = experts.expert_mlp(x, chosen, gate_up, down, 2)
    assert not found[0].any()
    check(found, network(x, chosen, gate_up, down, 2))


def scaled(outputs: int, inputs: int, dtype: torch.dtype, block: Any = None) -> ScaledWeights:
    shape = (outputs,) if block is None else (-(-outputs // block[0]), -(-inputs // block[1]))
    scales = (torch.rand(shape, device=DEVICE) + 0.5) / inputs**0.5
    values = random(outputs, inputs)
    if dtype == torch.int8:
        values, scales = values.mul(40).round().clamp(-127, 127), scales / 40
    return ScaledWeights(values.to(dtype), scales, block)


def grouped(outputs: int, inputs: int, **options: Any) -> GroupedWeights:
    bits, size = options.get("bits", 4), options.get("group_size", 16)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), device=DEVICE, dtype=torch.uint8)
    shape = outputs, -(-inputs // size)
    scales = torch.rand(shape, device=DEVICE) / (1 << bits) / inputs**0.5 * 4
    zeros = torch.randint(0, 1 << bits, shape, device=DEVICE, dtype=torch.uint8)
    order = torch.randperm(inputs, device=DEVICE).int()
    return GroupedWeights(
        codes,
        bits,
        scales.half(),
        size,
        zeros=zeros if options.get("has_zeros") else None,
        minima=-scales * 2 if options.get("has_minima") else None,
        order=order if options.get("has_order") else None,
        is_e2m1=options.get("is_e2m1", False),
    )


FORMATS: dict[str, Any] = {
    "fp8": lambda o, i: scaled(o, i, torch.float8_e4m3fn),
    "fp8 blocks": lambda o, i: scaled(o, i, torch.float8_e4m3fn, (32, 64)),
    "int8": lambda o, i: scaled(o, i, torch.int8),
    "4 bits": lambda o, i: grouped(o, i),
    "4 bits, zeros, order": lambda o, i: grouped(o, i, has_zeros=True, has_order=True),
    "mxfp4": lambda o, i: grouped(o, i, is_e2m1=True, group_size=32),
    "6 bits, minima": lambda o, i: grouped(o, i, bits=6, has_minima=True),
}


def packed(weights: list[QuantizedWeights]) -> ExpertMatrices:
    matrices = [
        ScaledMatrix(one) if isinstance(one, ScaledWeights) else pack_grouped(one, HALF)
        for one in weights
    ]
    stacked = stack_experts([[one] for one in matrices])
    assert stacked is not None and stacked.nbytes >= sum(one.nbytes for one in matrices)
    return stacked


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [(name, 7) for name in FORMATS] + [(name, 1) for name in ("fp8", "fp8 blocks", "mxfp4")],
)
def test_quantised_experts(name: str, num_tokens: int) -> None:
    """Few tokens by vectors or tiles of one pair, more by sorted tiles."""
    make, count = FORMATS[name], 4
    gate_up = [make(2 * WIDTH, HIDDEN) for _ in range(count)]
    down = [make(HIDDEN, WIDTH) for _ in range(count)]
    x, chosen = random(num_tokens, HIDDEN, dtype=HALF), random_routing(num_tokens, count, 2)
    numbers = [torch.stack([one.dequantize() for one in layer]) for layer in (gate_up, down)]
    found = experts.expert_mlp(x, chosen, packed(gate_up), packed(down))
    check(found, network(x, chosen, *numbers))


@pytest.mark.parametrize(("name", "num_tokens"), [("fp8 blocks", 1), ("int8", 20), ("mxfp4", 9)])
def test_product_of_one_expert(name: str, num_tokens: int) -> None:
    """Of a rank that has some of them, with a bias."""
    weights = [FORMATS[name](2 * WIDTH, HIDDEN) for _ in range(3)]
    x, bias = random(num_tokens, HIDDEN, dtype=HALF), random(3, 2 * WIDTH, dtype=HALF)
    found = experts.expert_product(x, packed(weights), 6, 4, bias)
    expected = x.float() @ weights[2].dequantize().float().t() + bias[2].float()
    check(found, expected.to(HALF))


@pytest.mark.parametrize(("name", "num_tokens"), [(None, 1), (None, 9), ("mxfp4", 7)])
def test_biases_and_a_clamped_gate(name: str | None, num_tokens: int) -> None:
    """As gpt-oss has them."""
    gate = ClampedGate(limit=1.5, slope=1.702)
    x, chosen = random(num_tokens, HIDDEN, dtype=HALF), random_routing(num_tokens, 4, 2)
    biases = random(4, 2 * WIDTH, dtype=HALF), random(4, HIDDEN, dtype=HALF)
    if name is None:
        numbers = kept = float_weights(4, HALF)
    else:
        shapes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        layers = [[FORMATS[name](*shape) for _ in range(4)] for shape in shapes]
        numbers = tuple(torch.stack([one.dequantize() for one in layer]) for layer in layers)
        kept = tuple(packed(layer) for layer in layers)
    found = experts.expert_mlp(x, chosen, *kept, 0, *biases, gate)
    check(found, network(x, chosen, *numbers, 0, gate, biases))


def test_parts_of_an_expert_are_joined() -> None:
    """Shards whose inputs are to be rounded differently are two matrices of 8 bits; here inputs are
    not rounded."""
    parts = [[scaled(WIDTH, HIDDEN, torch.float8_e4m3fn) for _ in range(2)] for _ in range(3)]
    gate_up = stack_experts([[ScaledMatrix(one) for one in expert] for expert in parts])
    assert gate_up is not None
    numbers = torch.stack([torch.cat([one.dequantize() for one in expert]) for expert in parts])
    down = random(3, HIDDEN, WIDTH, dtype=HALF) / WIDTH**0.5
    stacked_down = stack_experts([[DenseMatrix(one)] for one in down])
    assert isinstance(stacked_down, DenseExperts)
    x, chosen = random(2, HIDDEN, dtype=HALF), random_routing(2, 3, 2)
    found = experts.expert_mlp(x, chosen, gate_up, stacked_down)
    check(found, network(x, chosen, numbers, down))


def test_experts_in_several_formats_are_not_stacked() -> None:
    fp8, int8 = (ScaledMatrix(scaled(8, 64, dtype)) for dtype in (torch.float8_e4m3fn, torch.int8))
    four, six = (pack_grouped(grouped(8, 64, bits=bits), HALF) for bits in (4, 6))
    assert stack_experts([[fp8], [int8]]) is None
    assert stack_experts([[four], [six]]) is None
    assert stack_experts([[fp8], [four]]) is None
    assert stack_experts([[four], [four, four]]) is None


def test_every_kernel_is_met_where_they_change() -> None:
    """Between two neighbours of the list steps have the same tiles and kernels."""

    def kernels(num_tokens: int) -> tuple[object, ...]:
        num_pairs = num_tokens * 8
        size = experts.tile_size(num_pairs, 128)
        return (
            num_tokens <= experts.MAX_UNSORTED_TOKENS,
            size,
            expert_tiles.pairs_at_once(num_pairs),
            num_pairs > expert_tiles.PAIRS_AT_ONCE[-1],
        )

    met = {kernels(count) for count in experts.kernel_changes(128, 8)}
    assert {kernels(count) for count in range(1, 4000)} == met


# --- the layer ------------------------------------------------------------------------------------


@dataclass
class Made:
    """What layers have packed, in the order in which it arrived."""

    weights: list[QuantizedWeights]
    odd_one: int | None = None
    """Which of them no kernel takes."""

    def make(self, weights: QuantizedWeights, dtype: torch.dtype) -> Any:
        self.weights.append(weights)
        if len(self.weights) - 1 == self.odd_one:
            return ReferenceMatrix(weights)
        if isinstance(weights, ScaledWeights):
            return ScaledMatrix(weights)
        return pack_grouped(weights, dtype)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Layers pack their weights and choose their kernels as they do on a GPU."""
    made = Made([])
    monkeypatch.setattr(packed_layers, "make_matrix", made.make)
    monkeypatch.setattr(dispatch, "expert_mlp", experts.expert_mlp)
    return made


def build_layer(gate_up: str, down: str | None) -> tuple[Experts, Tensor]:
    """A layer with random weights, and those of down."""
    kept = Unquantized() if down is None else Packed(PackRounded(down, HALF))
    methods = {"gate_up_proj": Packed(PackRounded(gate_up, HALF)), "down_proj": kept}
    config = ExpertsConfig(COUNT, TOP_K, WIDTH, (True,))
    layer = Experts(config, HIDDEN, Build(HALF, DEVICE, Parallel(0, 1), methods.__getitem__))
    for linear in (layer.gate_up_proj, layer.down_proj):
        linear.when_loaded = layer._stack  # as on a GPU
    downs = random(COUNT, HIDDEN, WIDTH, dtype=HALF) / WIDTH**0.5
    for expert in range(COUNT):
        for part in ("up", "gate"):
            numbers = random(WIDTH, HIDDEN, dtype=HALF) / HIDDEN**0.5
            layer.gate_up_proj.load("weight", (expert, part), numbers)
    for expert in reversed(range(COUNT)):
        layer.down_proj.load("weight", (expert,), downs[expert])
    return layer, downs


@pytest.mark.parametrize(("gate_up", "down"), [("fp8", "int4"), ("int8", None)])
def test_a_layer_packs_all_experts_together(gate_up: str, down: str | None, made: Made) -> None:
    """They compute what was packed, and only one copy of it is kept."""
    layer, downs = build_layer(gate_up, down)
    linears = (layer.gate_up_proj, layer.down_proj)
    assert all(one.stack is not None for one in linears)
    assert not any(one.matrices or one.by_expert or one.why_slower for one in linears)
    numbers = torch.stack([one.dequantize() for one in made.weights[:COUNT]])
    if down is not None:
        downs = torch.stack([one.dequantize() for one in made.weights[: COUNT - 1 : -1]])
    x, chosen = random(7, HIDDEN, dtype=HALF), random_routing(7)
    check(layer(x, chosen), network(x, chosen, numbers, downs))
    layer._device = torch.device("cuda")
    assert not layer.waits_for_device


def test_a_layer_that_is_not_packed_together_says_so(made: Made) -> None:
    """It computes expert by expert, and no graph can hold it."""
    made.odd_one = COUNT + 2  # of down: gate and up are not stacked either
    layer, _ = build_layer("int4", "int4")
    for linear in (layer.gate_up_proj, layer.down_proj):
        assert linear.stack is None and len(linear.by_expert) == len(linear.matrices) == COUNT
        assert any("without CUDA graphs" in reason for reason in linear.why_slower)
    layer._device = torch.device("cuda")
    assert layer.waits_for_device
    layer.warm_up(1000)  # has no kernels of its own
    numbers = [one.dequantize() for one in made.weights]
    x, chosen = random(5, HIDDEN, dtype=HALF), random_routing(5)
    expected = network(
        x, chosen, torch.stack(numbers[:COUNT]), torch.stack(numbers[: COUNT - 1 : -1])
    )
    check(layer(x, chosen), expected)


@pytest.mark.parametrize(("packed", "is_stacked"), [("fp8", True), ("int4", False)])
def test_only_parts_that_stay_apart_are_told_of(
    packed: str, is_stacked: bool, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates and ups that are two matrices become one for all experts, where their kernel can."""
    monkeypatch.setattr(packed_layers, "join_alike", lambda parts: parts)
    layer, _ = build_layer(packed, None)
    layer.gate_up_proj.finish_loading()
    assert (layer.gate_up_proj.stack is not None) == is_stacked
    told = [reason for reason in layer.gate_up_proj.why_slower if "2 matrices" in reason]
    assert len(told) == (0 if is_stacked else 1)


def test_a_warm_up_meets_all_sizes_of_steps(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = build_layer("int4", "int4")
    met: list[int] = []
    monkeypatch.setattr(dispatch, "expert_mlp", lambda x, routing, *_: met.append(len(x)))
    layer.warm_up(100)
    wanted = [count for count in experts.kernel_changes(COUNT, TOP_K) if count <= 100]
    assert met == wanted and max(met) > 1
