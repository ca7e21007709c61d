"""Adapters on small models of each layout, against peft: batches of base tokens and several
adapters give what each gives alone."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.model import load_model_config
from quire.files.adapter import read_adapter
from quire.kernels import cpu
from quire.kernels.cpu.library import ISAS
from quire.layers.attention.cpu import CpuBackend
from quire.layers.attention.torch import TorchBackend
from quire.layers.lora import AdapterLayers, weight_rows
from quire.layers.parallel import Parallel, Stage
from quire.models.loader import load_model
from quire.protocol.errors import AdapterError
from quire.worker.adapters import HostAdapters
from tests.adapters import make_adapter
from tests.layers.ranks import on_ranks
from tests.models.adapters import AdaptedRun, Weights, place, random_adapter
from tests.models.reference import (
    FAMILIES,
    PagedRun,
    random_model,
    random_tokens,
    reference_logits,
    save_safetensors,
)

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (
        "llama",
        {},
        [
            {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
            {"r": 20, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
            {
                "r": 9,
                "target_modules": ["k_proj", "down_proj", "o_proj"],
                "rank_pattern": {"down_proj": 17},
                "alpha_pattern": {"k_proj": 3},
            },
        ],
    ),
    "bias": (
        "qwen2",
        {},
        [
            {"r": 4, "target_modules": LINEAR},
            {"r": 8, "target_modules": ["q_proj", "down_proj"], "lora_bias": True},
            {"r": 8, "target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
        ],
    ),
    "fused": (
        "phi3",
        {},
        [
            {"r": 4, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
            {"r": 12, "target_modules": ["qkv_proj"]},
        ],
    ),
    "half-fused": (
        "glm4",
        {},
        [
            {"r": 4, "target_modules": ["q_proj", "v_proj", "gate_up_proj", "down_proj"]},
            {"r": 8, "target_modules": ["o_proj", "gate_up_proj"]},
        ],
    ),
    "gpt2": (
        "gpt2",
        {},
        [
            {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
            {"r": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
        ],
    ),
    "opt": (
        "opt",
        {},
        [
            {"r": 4, "target_modules": ["q_proj", "out_proj", "fc1", "fc2"]},
            {"r": 8, "target_modules": ["k_proj", "fc1"], "use_dora": True},
        ],
    ),
    "dora": (
        "qwen2",
        {},
        [
            {"r": 8, "target_modules": LINEAR, "use_dora": True},
            {"r": 4, "target_modules": ["q_proj", "up_proj"], "use_dora": True},
        ],
    ),
    "ends": (
        "llama",
        {},
        [
            {"r": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
            {"r": 8, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        ],
    ),
    "tied": (
        "llama",
        {"tie_word_embeddings": True},
        [
            {"r": 8, "target_modules": ["embed_tokens", "q_proj"]},
            {"r": 4, "target_modules": ["lm_head", "down_proj"]},
        ],
    ),
    "latent": (
        "deepseek_v3",
        {},
        [
            {"r": 4, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
            {"r": 8, "target_modules": ["q_b_proj", "o_proj"]},
        ],
    ),
}
LENGTHS = (23, 40, 9, 31)
INVARIANT = ["llama", "bias", "fused", "gpt2", "ends"]


@pytest.mark.parametrize("case", CASES)
def test_as_peft(case: str, tmp_path: Path) -> None:
    family, changes, settings = CASES[case]
    base = random_model(family, **changes)
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu")
    adapted = [random_adapter(base, 7 + i, **one) for i, one in enumerate(settings)]
    layers = AdapterLayers.of(model, max_adapters=6, num_chunks=9, max_rank=32)
    place(layers, [weights for _, weights in adapted])
    slots = [-1, 0, 1, len(settings) - 1]
    sequences = [random_tokens(length, length) for length in LENGTHS]
    run = AdaptedRun(layers, slots, model, config, sequences, CpuBackend)
    run.step({0: 10, 1: 40, 2: 3})
    run.step({0: 13, 2: 6, 3: 20})
    run.step({3: 11})
    for slot, tokens, found in zip(slots, sequences, run.all_logits(), strict=True):
        reference = base if slot < 0 else adapted[slot][0]
        expected = reference_logits(reference, tokens)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        if slot >= 0:
            assert (expected - reference_logits(base, tokens)).abs().max() > 0.1


LATENT_EXPANSION = "kv_b_proj"
"""Takes no adapter."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    """All linear layers and embeddings that are no experts, by the names of their modules."""
    base = random_model(family)
    kinds = ("Linear", "Conv1D", "Embedding")
    found = {
        path.rpartition(".")[2]
        for path, module in base.named_modules()
        if type(module).__name__ in kinds or path.endswith("embed_tokens")
    }
    found -= {"wpe", "embed_positions", LATENT_EXPANSION}
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    if config.experts is not None:  # peft takes their names for those of experts
        found -= {"gate_proj", "up_proj", "down_proj"}
    model = load_model(config, dtype=torch.float32, device="cpu")
    transposed = {"fan_in_fan_out": True} if family == "gpt2" else {}
    adapted, weights = random_adapter(base, 3, r=4, target_modules=sorted(found), **transposed)
    layers = AdapterLayers.of(model, max_adapters=1, num_chunks=1)
    place(layers, [weights])
    tokens = random_tokens(30)
    run = AdaptedRun(layers, [0, -1], model, config, [tokens, tokens], CpuBackend)
    run.step({0: 20, 1: 30})
    run.step({0: 10})
    for reference, logits in zip((adapted, base), run.all_logits(), strict=True):
        expected = reference_logits(reference, tokens)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", INVARIANT)
def test_company_changes_no_bit(case: str, isa: str, tmp_path: Path, native: None) -> None:
    """A token's logits do not depend on which adapters others use, and those of base tokens are
    what they are without adapters."""
    quantization = (None, "int8")[(INVARIANT.index(case) + ISAS.index(isa)) % 2]
    if isa not in cpu.isas():
        pytest.skip(f"this processor has no {isa}")
    family, changes, settings = CASES[case]
    base = random_model(family, **changes)
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu", quantization=quantization)
    sequences = [random_tokens(length, length) for length in LENGTHS]
    cpu.set_isa(isa)
    try:
        plain = PagedRun(model, config, sequences, CpuBackend)
        plain.step({0: 23})
        layers = AdapterLayers.of(model, max_adapters=6, num_chunks=9, max_rank=32)
        place(layers, [random_adapter(base, 7 + i, **one)[1] for i, one in enumerate(settings)])
        slots = [-1, 0, 1, len(settings) - 1]
        mixed = AdaptedRun(layers, slots, model, config, sequences, CpuBackend)
        mixed.step({0: 10, 1: 40, 2: 3})
        mixed.step({0: 13, 2: 6, 3: 20})
        mixed.step({3: 11})
        alone = AdaptedRun(layers, slots, model, config, sequences, CpuBackend)
        for index, length in enumerate(LENGTHS):
            alone.step({index: length})
    finally:
        cpu.set_isa(None)
    assert torch.equal(mixed.all_logits()[0], torch.cat(plain.logits[0]))
    for found, wanted in zip(mixed.all_logits(), alone.all_logits(), strict=True):
        assert torch.equal(found, wanted)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: (False, "not here"))
    family, _, settings = CASES["dora"]
    base = random_model(family)
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu")
    adapted, weights = random_adapter(base, 3, **settings[0])
    layers = AdapterLayers.of(model, max_adapters=1, num_chunks=1)
    place(layers, [weights])
    tokens = random_tokens(20)
    run = AdaptedRun(layers, [0], model, config, [tokens], TorchBackend)
    run.step({0: 20})
    expected = reference_logits(adapted, tokens)
    torch.testing.assert_close(run.all_logits()[0], expected, atol=1e-4, rtol=1e-4)


def test_places_are_used_again(tmp_path: Path) -> None:
    """What an earlier adapter left in the same chunks, or under the same slot, does not show."""
    base = random_model("llama")
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu")
    first = {"r": 16, "target_modules": LINEAR, "use_dora": True, "modules_to_save": ["lm_head"]}
    second = {"r": 4, "target_modules": ["q_proj"]}
    adapted, weights = random_adapter(base, 4, **second)
    layers = AdapterLayers.of(model, max_adapters=1, num_chunks=2)
    layers.place(0, [1, 0], layers.prepare(random_adapter(base, 3, **first)[1]))
    layers.clear(0)
    tokens = random_tokens(20)

    def logits() -> torch.Tensor:
        run = AdaptedRun(layers, [0], model, config, [tokens], CpuBackend)
        run.step({0: 20})
        return run.all_logits()[0]

    torch.testing.assert_close(logits(), reference_logits(base, tokens), atol=1e-4, rtol=1e-4)
    layers.place(0, [1], layers.prepare(weights))
    torch.testing.assert_close(logits(), reference_logits(adapted, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.9.self_attn.q_proj": "a"}, "the model has no model.layers.9"),
        ({"model.norm": "weight"}, "model.norm is no linear layer"),
        ({"model.layers.0.mlp.up_proj": "weight"}, r"modules_to_save\), which embeddings"),
        ({"lm_head": "short"}, r"lm_head is saved as \[3, 3\]"),
        ({"model.layers.0.mlp.up_proj": "rank"}, "has lora_A of rank 2 and lora_B of rank 3"),
        ({"model.layers.0.mlp.up_proj": "short"}, r"has lora_A \[3, 3\] and lora_B \[3, 3\]"),
        ({"model.layers.0.mlp.up_proj": "bias"}, "has a bias in place of the base's, which has no"),
        ({"model.layers.0.mlp.up_proj": "large"}, "rank 40, and there is room for 16; raise"),
    ],
)
def test_refused(change: dict[str, str], message: str, tmp_path: Path) -> None:
    base = random_model("llama")
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu")
    layers = AdapterLayers.of(model, max_adapters=2, num_chunks=5, max_rank=16)
    made = {
        "a": Weights(torch.ones(1, 64), torch.ones(64, 1)),
        "weight": Weights(saved={"weight": torch.ones(64)}),
        "short": Weights(torch.ones(3, 3), torch.ones(3, 3)),
        "rank": Weights(torch.ones(2, 64), torch.ones(96, 3)),
        "bias": Weights(torch.ones(1, 64), torch.ones(96, 1), saved={"bias": torch.ones(96)}),
        "large": Weights(torch.ones(40, 64), torch.ones(96, 40)),
    }
    (path, kind), *_ = change.items()
    weights = made[kind]
    if (path, kind) == ("lm_head", "short"):
        weights = Weights(saved={"weight": torch.ones(3, 3)})
    with pytest.raises(AdapterError, match=message):
        layers.prepare({path: weights})


def test_what_does_not_fit_is_not_read(tmp_path: Path) -> None:
    """It may be larger than the memory of the host."""
    base = random_model("llama")
    model = load_model(
        load_model_config(str(save_safetensors(base, tmp_path / "base"))),
        dtype=torch.float32,
        device="cpu",
    )
    make_adapter(random_model("llama", hidden_size=32), tmp_path / "one", target_modules=["q_proj"])
    path = tmp_path / "one" / "adapter_model.safetensors"
    save_file({name: one.fill_(torch.nan) for name, one in load_file(path).items()}, path)
    adapters = HostAdapters(AdapterLayers.of(model, max_adapters=1, num_chunks=1))
    file = read_adapter(path.parent, "one")
    with pytest.raises(AdapterError, match=r"'one': The adapter does not fit the model: .*q_proj"):
        adapters.load("one", str(path.parent), file.digest).result()
    adapters.shutdown()


EXPERT_FAMILIES = ["mixtral", "qwen3_moe", "qwen2_moe", "granitemoe", "gpt_oss", "deepseek_v3"]


def with_experts(base: Any, family: str, seed: int) -> tuple[Any, dict[str, Weights]]:
    """A copy of `base` with B A added to the experts of its last layer but one, and these pairs."""
    merged, weights = copy.deepcopy(base), {}
    generator = torch.Generator().manual_seed(seed)
    layer, is_granite = merged.model.layers[2], family == "granitemoe"
    path = f"model.layers.2.{'block_sparse_moe' if is_granite else 'mlp'}.experts"
    experts = (layer.block_sparse_moe if is_granite else layer.mlp).experts
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if family == "gpt_oss":  # stored [inputs, outputs]
        gate_up, down = gate_up.mT, down.mT
    inner = down.shape[2]
    for expert in range(1, len(down)):
        both = gate_up[expert]
        halves = {"gate_proj": both[:inner], "up_proj": both[inner:], "down_proj": down[expert]}
        if family == "gpt_oss":
            halves |= {"gate_proj": both[::2], "up_proj": both[1::2]}
        for rank, (name, weight) in enumerate(halves.items(), 1):
            a = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
            b = torch.randn(len(weight), rank, generator=generator) * 0.2
            weights[f"{path}.{expert}.{name}"] = Weights(a, b, 2.0)
            with torch.no_grad():
                weight += 2.0 * b @ a
    return merged, weights


@pytest.mark.parametrize(
    ("family", "is_native"),
    [*((family, True) for family in EXPERT_FAMILIES), ("mixtral", False), ("gpt_oss", False)],
)
def test_experts(
    family: str, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers computes with the merged weights; base tokens beside them to the bit."""
    if not is_native:
        monkeypatch.setattr(cpu, "available", lambda: (False, "not here"))
    base = random_model(family)
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu")
    backend = CpuBackend if is_native else TorchBackend
    sequences = [random_tokens(length, length) for length in LENGTHS]
    plain = PagedRun(model, config, sequences, backend)
    plain.step({0: 23, 1: 10})
    layers = AdapterLayers.of(model, max_adapters=2, num_chunks=3)
    adapted = [with_experts(base, family, seed) for seed in (1, 2)]
    place(layers, [weights for _, weights in adapted])
    slots = [-1, 0, 1, 0]
    mixed = AdaptedRun(layers, slots, model, config, sequences, backend)
    mixed.step({0: 23, 1: 10, 2: 5})
    mixed.step({1: 30, 2: 4, 3: 31})
    alone = AdaptedRun(layers, slots, model, config, sequences, backend)
    for index, length in enumerate(LENGTHS):
        alone.step({index: length})
    for slot, tokens, found, same in zip(
        slots, sequences, mixed.all_logits(), alone.all_logits(), strict=True
    ):
        reference = base if slot < 0 else adapted[slot][0]
        expected = reference_logits(reference, tokens)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        if is_native and family != "deepseek_v3":
            assert torch.equal(found, same)
    if is_native:
        assert torch.equal(mixed.logits[0][0], plain.logits[0][0])
    changed = reference_logits(adapted[0][0], sequences[1]) - reference_logits(base, sequences[1])
    assert changed.abs().max() > 0.05


@pytest.mark.parametrize(
    ("case", "size"),
    [("llama", 3), ("bias", 2), ("fused", 2), ("half-fused", 2), ("gpt2", 3), ("ends", 2)],
)
def test_ranks(case: str, size: int, tmp_path: Path) -> None:
    """Each rank has its share of A or of B; with three, heads and widths are padded."""
    family, changes, settings = CASES[case]
    settings = [{**one, "use_dora": False} for one in settings]
    base = random_model(family, **changes)
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    adapted = [random_adapter(base, 7 + i, **one) for i, one in enumerate(settings)]
    sequences = [random_tokens(length, length) for length in LENGTHS]
    slots = [-1, 0, 1, len(settings) - 1]

    def logits(parallel: Parallel) -> list[torch.Tensor]:
        model = load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)
        layers = AdapterLayers.of(model, max_adapters=6, num_chunks=9, max_rank=32)
        place(layers, [weights for _, weights in adapted])
        heads = parallel.heads(config.num_heads, config.num_kv_heads)
        run = AdaptedRun(layers, slots, model, config, sequences, num_ranks=parallel.size)
        run.backend = type(run.backend)(
            torch.full(
                (
                    config.num_layers,
                    2,
                    200,
                    heads.kv_count,
                    4,
                    config.head_dim,
                ),
                float("nan"),
            ),
            heads.count,
            heads.kv_count,
            config.head_dim,
            4,
        )
        run.step({0: 10, 1: 40, 2: 3})
        run.step({0: 13, 2: 6, 3: 31})
        return run.all_logits()

    for found in on_ranks(size, logits):
        for slot, tokens, one in zip(slots, sequences, found, strict=True):
            expected = reference_logits(base if slot < 0 else adapted[slot][0], tokens)
            torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_whole", [False, True], ids=["parts of experts", "whole experts"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_on_ranks(family: str, is_whole: bool, tmp_path: Path) -> None:
    base = random_model(family)
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    merged, weights = with_experts(base, family, 1)
    tokens = random_tokens(30)

    def logits(parallel: Parallel) -> torch.Tensor:
        parallel = dataclasses.replace(parallel, expert_parallel=is_whole)
        model = load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)
        layers = AdapterLayers.of(model, max_adapters=1, num_chunks=1)
        place(layers, [weights])
        run = AdaptedRun(layers, [0], model, config, [tokens], num_ranks=parallel.size)
        run.step({0: 30})
        return run.all_logits()[0]

    for found in on_ranks(2, logits):
        torch.testing.assert_close(found, reference_logits(merged, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "llama"])
def test_stages_take_their_own_modules(family: str, tmp_path: Path) -> None:
    base = random_model(family)
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    _, weights = random_adapter(base, 1, r=4, target_modules=["q_proj", "o_proj", "lm_head"])
    if family != "llama":
        weights |= with_experts(base, family, 1)[1]
    counts = []
    for index in range(2):
        parallel = Parallel(stage=Stage(index, 2))
        model = load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)
        layers = AdapterLayers.of(model, max_adapters=1, num_chunks=1)
        prepared = layers.prepare(weights)
        counts.append(int((prepared.state > 0).sum()))
        with pytest.raises(AdapterError, match=r"no model.layers.7.self_attn.q_proj"):
            layers.prepare({"model.layers.7.self_attn.q_proj": next(iter(weights.values()))})
    assert min(counts) > 0 and sum(counts) == len(weights)


def test_ranks_agree_on_what_an_adapter_has_of_experts(tmp_path: Path) -> None:
    """Each names experts that the model lacks, and learns of those that another has: all must take
    the same way through a step."""
    base = random_model("mixtral")
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    _, weights = with_experts(base, "mixtral", 1)
    one = {path: own for path, own in weights.items() if ".experts.1." in path}
    name, own = next((path, own) for path, own in one.items() if "gate_proj" in path)
    wrong = [
        name.replace(".experts.1.", ".experts.99."),
        name.replace(".experts.1.", ".experts.01."),
        name.replace("gate_proj", "foo_proj"),
        name.replace("layers.2", "layers.7"),
    ]

    def prepared(parallel: Parallel) -> tuple[bool, bool, int]:
        model = load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)
        layers = AdapterLayers.of(model, max_adapters=2, num_chunks=2)
        for path in wrong:
            with pytest.raises(AdapterError, match=f"the model has no {path}"):
                layers.prepare(one | {path: own})
        adapter = layers.prepare(one)
        layers.place(1, [0], adapter)
        return layers.needs_eager_step([0, 1]), layers.needs_eager_step([0]), len(adapter.runs)

    def on_rank(parallel: Parallel) -> tuple[bool, bool, int]:
        return prepared(dataclasses.replace(parallel, expert_parallel=True))

    assert on_ranks(2, on_rank) == [(True, False, 1), (True, False, 0)]
    stages = [prepared(Parallel(stage=Stage(index, 2))) for index in range(2)]
    assert stages == [(True, False, 0), (True, False, 1)]


def test_adapters_that_rest_cost_steps_nothing(tmp_path: Path) -> None:
    """What takes the place of a layer's weight is looked at where a token uses it."""
    base = random_model("llama")
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu")
    layers = AdapterLayers.of(model, max_adapters=2, num_chunks=2)
    _, plain = random_adapter(base, 1, r=2, target_modules=["q_proj"])
    _, whole = random_adapter(base, 2, r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    place(layers, [plain, whole])
    assert [layers.needs_eager_step(used) for used in ([], [0], [1], [0, 1])] == [0, 0, 1, 1]
    slots = torch.zeros(3, dtype=torch.int32)
    found = []
    for used in ([0], [0, 1], None):
        layers.begin_step(slots, slots, used)
        found.append([slot for slot, _ in layers.saved("lm_head")])
    assert found == [[], [1], [1]]
    layers.clear(1)
    assert not layers.needs_eager_step([1]) and not list(layers.saved("lm_head"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_that_overflow_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Each of a file's numbers is finite; what is computed from them is not."""
    base = random_model("qwen2")
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=dtype, device="cpu")
    layers = AdapterLayers.of(model, max_adapters=1, num_chunks=1)
    path, tokens = "model.layers.0.self_attn.q_proj", "model.embed_tokens"
    num_outputs, num_inputs = base.get_submodule(path).weight.shape
    a, b = torch.full((2, num_inputs), 0.1), torch.full((num_outputs, 2), 0.1)
    root, large = torch.finfo(dtype).max ** 0.5, torch.finfo(dtype).max / 2

    def refused(match: str, own: Weights, module: str = path) -> None:
        with pytest.raises(AdapterError, match=f"{module}: {match}"):
            layers.prepare({module: own})

    refused("lora_B, scaled", Weights(a, b * large, scaling=100.0))
    refused("lora_B lora_A, scaled", Weights(a * root * 10, b * root * 10))
    refused("what is added", Weights(a, b, 9.0, bias=torch.full((num_outputs,), large)))
    dim = base.get_submodule(tokens).weight.shape[1]
    of_tokens = Weights(torch.full((1, config.vocab_size), root), torch.full((dim, 1), root / 2))
    layers.prepare({tokens: of_tokens})  # of which one column at a time is used
    of_tokens.scaling = 100.0
    refused("lora_B lora_A, scaled", of_tokens, tokens)
    layers.prepare({path: Weights(a * 10, b * 100, 2.0)})
    if dtype == torch.float16:
        refused("lora_A", Weights(a * 1e6, b / 1e6))
        refused("lora_magnitude", Weights(a, b, magnitude=torch.full((num_outputs,), 1e9)))
        weight = torch.full((config.vocab_size, dim), 1e6)
        refused("the saved weight", Weights(saved={"weight": weight}), tokens)


def test_what_latents_expand_with_takes_no_adapter(tmp_path: Path) -> None:
    base = random_model("deepseek_v3")
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu")
    layers = AdapterLayers.of(model, max_adapters=1, num_chunks=1)
    _, weights = random_adapter(base, 1, r=4, target_modules=["kv_b_proj"])
    with pytest.raises(AdapterError, match="kv_b_proj is multiplied with queries"):
        layers.prepare(weights)


def test_dora_needs_all_inputs(tmp_path: Path) -> None:
    base = random_model("llama")
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu", parallel=Parallel(0, 2))
    layers = AdapterLayers.of(model, max_adapters=1, num_chunks=1)
    _, weights = random_adapter(base, 1, r=4, target_modules=["down_proj"], use_dora=True)
    with pytest.raises(AdapterError, match="DoRA, whose norms need all inputs"):
        layers.prepare(weights)
    _, weights = random_adapter(base, 1, r=4, target_modules=["up_proj"], use_dora=True)
    assert layers.prepare(weights).num_chunks == 1


@pytest.mark.parametrize("quantization", ["int8", "gguf", "fp8", "int4"])
def test_quantized_base(quantization: str, tmp_path: Path) -> None:
    """The delta adds to what the quantised layer gives; norms of DoRA are those of the rounded
    weight."""
    base = random_model("qwen2", intermediate_size=128)
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu", quantization=quantization)
    _, weights = random_adapter(base, 1, r=8, target_modules=["k_proj", "down_proj"], use_dora=True)
    layers = AdapterLayers.of(model, max_adapters=1, num_chunks=1)
    place(layers, [weights])
    layer = model.model.layers.get_submodule("1")
    slots = torch.tensor([0, -1, 0], dtype=torch.int32)
    for linear, path, columns in (
        (layer.self_attn.qkv_proj, "model.layers.1.self_attn.k_proj", slice(64, 96)),
        (layer.mlp.down_proj, "model.layers.1.mlp.down_proj", slice(0, 64)),
    ):
        own = weights[path]
        x = torch.randn(3, linear.axes["weight"][-1][0].size)
        layers.begin_step(None)
        plain = linear.method.apply(linear, x, linear.bias)
        layers.begin_step(slots)
        found = linear.method.apply(linear, x, linear.bias)
        rounded = weight_rows(linear, torch.arange(columns.start, columns.stop))
        norms = (rounded + own.scaling * own.b @ own.a).norm(dim=1)
        factors = own.magnitude / norms
        bias = 0.0 if linear.bias is None else linear.bias[columns]
        products = plain[:, columns] - bias + own.scaling * (x @ own.a.t()) @ own.b.t()
        expected = plain.clone()
        expected[:, columns] = factors * products + bias
        expected[1] = plain[1]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(found[1], plain[1])
        assert (found - plain).abs().max() > 0.1
