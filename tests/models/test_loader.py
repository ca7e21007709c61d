"""The loader fills every parameter exactly once, or names the tensors that do not fit.

Tensors come from transformers' state dicts of small random models.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.config.model import SUPPORTED_ARCHITECTURES, ModelConfig, load_model_config
from quire.layers.attention.layer import StepContext
from quire.layers.parallel import Parallel
from quire.layers.weights import Build, Shard, WeightedLayer, divided, stacked, whole
from quire.models.loader import load_model, load_weights
from quire.models.registry import CausalLM, WeightMap, model_class
from quire.protocol.errors import ModelError
from tests.layers.ranks import build_for, on_ranks
from tests.models.reference import (
    PagedRun,
    random_model,
    random_tokens,
    reference_logits,
    save_safetensors,
)

Tensors = dict[str, torch.Tensor]


def empty_model(config: ModelConfig) -> CausalLM:
    return model_class(config.architecture)(config, build_for())


def saved(folder: Path, family: str = "llama", **changes: object) -> tuple[ModelConfig, Tensors]:
    """A configuration read by us, and the tensors that belong to it."""
    reference = random_model(family, **changes)
    save_safetensors(reference, folder)
    return load_model_config(str(folder)), dict(reference.state_dict())


def failure(config: ModelConfig, tensors: Tensors) -> str:
    with pytest.raises(ModelError) as caught:
        load_weights(empty_model(config), config, tensors.items())
    return str(caught.value)


def test_all_misfits_are_named_at_once(tmp_path: Path) -> None:
    """A user must not have to fix a folder one tensor at a time."""
    config, tensors = saved(tmp_path)
    del tensors["model.norm.weight"]
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.lora_A"] = torch.zeros(2)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 63)
    message = failure(config, tensors)
    assert str(tmp_path) in message
    assert "LlamaForCausalLM" in message
    assert "2 tensors missing: " in message
    assert "model.norm.weight" in message
    assert "model.layers.1.self_attn.k_proj.weight" in message
    assert "1 tensor not part of the model: model.layers.0.self_attn.q_proj.lora_A" in message
    assert "model.layers.2.mlp.up_proj.weight (expected [96, 64], found [96, 63])" in message


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    message = failure(config, {name: t for name, t in tensors.items() if "layers" not in name})
    assert "27 tensors missing" in message
    assert "and 17 more" in message
    assert message.count("model.layers.") == 10


def test_transposed_shapes_are_reported_as_stored(tmp_path: Path) -> None:
    """GPT-2 keeps its matrices [in, out]; the message must show what the file should hold."""
    config, tensors = saved(tmp_path, "gpt2")
    name = "transformer.h.0.attn.c_attn.weight"
    tensors[name] = tensors[name].t()
    assert f"{name} (expected [64, 192], found [192, 64])" in failure(config, tensors)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w2.weight"),
        ("mixtral", "block_sparse_moe.gate.weight"),
        ("granitemoe", "block_sparse_moe.router.layer.weight"),
        ("granitemoe", "block_sparse_moe.output_linear.weight"),
        ("gpt_oss", "mlp.router.bias"),
        ("gpt_oss", "mlp.experts.gate_up_proj"),
    ],
)
def test_missing_tensors_are_named_as_stored(family: str, tensor: str, tmp_path: Path) -> None:
    config, _ = saved(tmp_path, family)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.{tensor}"]
    assert f"1 tensor missing: model.layers.1.{tensor}." in failure(config, tensors)


def test_a_tensor_under_two_names_is_left_over(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path, "opt")
    tensors["decoder.final_layer_norm.bias"] = torch.zeros(64)
    message = failure(config, tensors)
    assert "1 tensor not part of the model: decoder.final_layer_norm.bias" in message


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_tied_head(family: str, tmp_path: Path) -> None:
    """A repeated embedding is accepted; a head of its own under a tied configuration is not."""
    config, tensors = saved(tmp_path, family, tie_word_embeddings=True)
    head = tensors.pop("lm_head.weight")
    load_weights(empty_model(config), config, tensors.items())
    load_weights(empty_model(config), config, {"lm_head.weight": head, **tensors}.items())
    message = failure(config, {**tensors, "lm_head.weight": head + 1})
    assert "lm_head.weight differs" in message
    assert "tie_word_embeddings" in message


def test_untied_head_is_required(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    del tensors["lm_head.weight"]
    assert "1 tensor missing: lm_head.weight" in failure(config, tensors)


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    """Llama checkpoints written before 2023's end carry them."""
    config, tensors = saved(tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    load_weights(empty_model(config), config, tensors.items())


def test_layers_that_draft_are_ignored(tmp_path: Path) -> None:
    """DeepSeek-V3 has one behind its last layer (MTP)."""
    config, _ = saved(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.{config.num_layers}.enorm.weight"] = torch.ones(3)
    load_weights(empty_model(config), config, tensors.items())
    tensors[f"model.layers.{config.num_layers + 1}.enorm.weight"] = torch.ones(3)
    assert f"not part of the model: model.layers.{config.num_layers + 1}" in failure(
        config, tensors
    )


def test_tensors_are_dropped_as_they_are_read(tmp_path: Path) -> None:
    """Loading must not hold a second copy of the model."""
    config, tensors = saved(tmp_path)
    alive: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in list(tensors):
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = tensors.pop(name)
            alive.append(weakref.ref(tensor))
            yield name, tensor

    load_weights(empty_model(config), config, stream())
    assert len(alive) == 30


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_weights_are_cast_while_read(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    reference = random_model("llama").to(stored)
    save_safetensors(reference, tmp_path)
    model = load_model(load_model_config(str(tmp_path)), dtype=wanted, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    gate = reference.model.layers[1].mlp.gate_proj.weight
    layer = model.model.layers[1].mlp.gate_up_proj
    assert torch.equal(layer.method.rows(layer, torch.arange(96)), gate.to(wanted))


def test_half_precision_stays_close(tmp_path: Path) -> None:
    """bf16 must flow through all layers without an accidental fp32 tensor or overflow."""
    reference = random_model("qwen3")
    save_safetensors(reference, tmp_path)
    config = load_model_config(str(tmp_path))
    model = load_model(config, dtype=torch.bfloat16, device="cpu")
    tokens = random_tokens(20)
    run = PagedRun(model, config, [tokens], dtype=torch.bfloat16)
    run.step({0: 20})
    logits, expected = run.all_logits()[0], reference_logits(reference, tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


def dummy(config: ModelConfig, **options: object) -> CausalLM:
    return load_model(config, dtype=torch.float32, device="cpu", load_format="dummy", **options)


@pytest.mark.parametrize("family", ["qwen2", "opt", "gpt2"])
def test_dummy_weights_follow_the_seed(family: str, tmp_path: Path) -> None:
    config, _ = saved(tmp_path, family)
    first, again = dummy(config, seed=3).state_dict(), dummy(config, seed=3).state_dict()
    other = dummy(config, seed=4).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if tensor.dim() == 2:
            assert not torch.equal(tensor, other[name])
            assert 0.015 < tensor.std() < 0.025
    assert torch.equal(
        first[next(n for n in first if "norm.weight" in n or "ln" in n)], torch.ones(64)
    )


def test_dummy_weights_agree_between_ranks(tmp_path: Path) -> None:
    """Any number of ranks makes the same model, so benchmarks of them are comparable."""
    config, _ = saved(tmp_path, "qwen2")
    tokens = random_tokens(12)

    def logits(parallel: Parallel) -> torch.Tensor:
        run = PagedRun(dummy(config, parallel=parallel), config, [tokens], num_ranks=parallel.size)
        run.step({0: len(tokens)})
        return run.all_logits()[0]

    for of_rank in on_ranks(2, logits):
        torch.testing.assert_close(of_rank, logits(Parallel(0, 1)), rtol=0, atol=1e-5)


def test_unknown_architecture_is_refused_with_the_list() -> None:
    with pytest.raises(ModelError, match=r"'MambaForCausalLM'.*GPT2LMHeadModel.*LlamaForCausalLM"):
        model_class("MambaForCausalLM")


def test_every_listed_architecture_has_its_class() -> None:
    for architecture in SUPPORTED_ARCHITECTURES:
        assert model_class(architecture).__name__ == architecture


class Experts(WeightedLayer):
    """Three experts, each with a gate and an up projection, as one parameter."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        shards = (divided(8, build.parallel, name) for name in ("gate", "up"))
        self.add_weight("weight", (stacked(3), sum(shards, ()), whole(4)), build)
        self.add_weight("scale", (stacked(3), by_shard("gate", "up")), build)


def by_shard(*names: str) -> tuple[Shard, ...]:
    return tuple(Shard(1, 0, 1, name) for name in names)


class ModelOfExperts(CausalLM):
    weight_map = WeightMap(
        fused={
            "experts": {
                (expert, shard): f"experts.{expert}.{theirs}"
                for expert in range(3)
                for shard, theirs in (("gate", "w1"), ("up", "w3"))
            }
        }
    )

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.experts = Experts(build / "experts")

    def forward(self, step: StepContext) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_are_loaded_by_number_and_shard(rank: int, tmp_path: Path) -> None:
    """Matrices in any order; scales without a dimension, or with one."""
    config, _ = saved(tmp_path)
    model = ModelOfExperts(config, build_for(Parallel(rank, 2)))
    tensors: Tensors = {}
    for expert in (2, 0, 1):
        for number, name in enumerate(("w3", "w1")):
            tensors[f"experts.{expert}.{name}.weight"] = torch.randn(8, 4)
            scale = torch.tensor(float(10 * expert + number))
            tensors[f"experts.{expert}.{name}.scale"] = scale if expert else scale.view(1, 1)
    load_weights(model, config, tensors.items())
    for expert in range(3):
        gate, up = (tensors[f"experts.{expert}.{name}.weight"] for name in ("w1", "w3"))
        mine = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(model.experts.weight[expert], torch.cat((gate[mine], up[mine])))
    assert model.experts.scale.tolist() == [[1.0, 0.0], [11.0, 10.0], [21.0, 20.0]]
    del tensors["experts.2.w3.weight"]
    with pytest.raises(ModelError, match=r"1 tensor missing: experts\.2\.w3\.weight"):
        load_weights(model, config, tensors.items())


def test_layers_must_be_built_under_their_names(tmp_path: Path) -> None:
    """A method would be chosen for another layer."""
    config, _ = saved(tmp_path)
    model = ModelOfExperts(config, build_for() / "wrong")
    with pytest.raises(AssertionError, match=r"at experts was built as 'wrong\.experts'"):
        load_weights(model, config, [])
