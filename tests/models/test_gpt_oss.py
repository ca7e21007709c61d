"""gpt-oss as it is released: its configuration, and experts in MXFP4, all of a layer in one
tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from quire.config.device import DeviceInfo
from quire.config.experts import ClampedGate
from quire.config.model import load_model_config
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.layers.experts import ExpertLinear
from quire.layers.parallel import Parallel
from quire.layers.rotary import rotary_frequencies
from quire.layers.weights import MatrixLayer
from quire.models.loader import count_weight_bytes, held_weight_bytes, load_model
from quire.protocol.errors import ModelError
from tests.layers.ranks import on_ranks
from tests.models.reference import PagedRun, random_model, random_tokens, reference_logits

TOKENS = random_tokens(33)
LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 5, 64, 288
"""The width has 9 blocks of 32: of two ranks one has 5, and the other 4 and padding."""
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "experts_per_token": 3,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": WIDTH,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "output_router_logits": False,
    "pad_token_id": 1,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 9,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 160,
}


def released_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Those of a model, with other random numbers for experts: all of a layer in MXFP4."""
    tensors = {}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        by_block = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            256, (*by_block, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.randint(
            120, 125, by_block, dtype=torch.uint8, generator=generator
        )
    return tensors


def dequantized_model(folder: Path) -> PreTrainedModel:
    """transformers' model with the numbers of the files."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
        dtype=torch.float32,
    )
    return model.float()


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    model = random_model(
        "gpt_oss",
        num_hidden_layers=LAYERS,
        intermediate_size=WIDTH,
        head_dim=16,
        num_local_experts=EXPERTS,
        layer_types=CONFIG["layer_types"],
    )
    tensors = released_tensors(model)
    assert tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (5, 576, 2, 16)
    assert tensors["model.layers.1.mlp.experts.down_proj_scales"].shape == (5, 64, 9)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def expected(released: Path) -> Tensor:
    """transformers dequantises the same files."""
    return reference_logits(dequantized_model(released), TOKENS)


def logits(folder: Path, parallel: Parallel = Parallel()) -> Tensor:  # noqa: B008
    config = load_model_config(str(folder))
    model = load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)
    run = PagedRun(model, config, [TOKENS], num_ranks=parallel.size)
    for count in (20, 1, 12):
        run.step({0: count})
    return run.all_logits()[0]


def close(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_logits_are_those_of_transformers(released: Path, expected: Tensor) -> None:
    close(logits(released), expected)


def test_type_of_activations_is_that_of_stored_floats(released: Path) -> None:
    """The released config.json does not name it."""
    config = load_model_config(str(released))
    assert config.dtype == "bfloat16"
    gpu = DeviceInfo("cuda", "NVIDIA H200", 140 << 30, num_threads=16)
    found = resolve(EngineOptions.from_arguments(model=str(released)), config, gpu)
    assert found.options.model.dtype == "bfloat16"
    assert not any("dtype became" in note for note in found.notes)


@pytest.mark.parametrize("is_whole", [False, True], ids=["parts of experts", "whole experts"])
def test_ranks_share_blocks(released: Path, expected: Tensor, is_whole: bool) -> None:
    """Whole blocks of each expert, or whole experts; biases are added once."""
    parts = on_ranks(2, lambda one: logits(released, replace(one, expert_parallel=is_whole)))
    for part in parts:
        close(part, expected)


def test_experts_stay_in_four_bits(released: Path) -> None:
    config = load_model_config(str(released))
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    model = load_model(config, **options)
    for layer in model.modules():
        if isinstance(layer, ExpertLinear):
            codes = EXPERTS * WIDTH * HIDDEN // 2 * (2 if "gate_up" in layer.path else 1)
            assert len(layer.matrices) == EXPERTS and not layer.why_slower
            assert codes < sum(matrix.nbytes for matrix in layer.matrices) < 1.4 * codes
    held, counted = held_weight_bytes(model), count_weight_bytes(config, **options)
    assert counted == pytest.approx(held, rel=0.03)


def test_random_weights_need_no_files(released: Path, tmp_path: Path) -> None:
    """The lists of what is not converted have a "*" for the number of a layer."""
    (tmp_path / "config.json").write_text((released / "config.json").read_text())
    config = load_model_config(str(tmp_path), load_format="dummy")
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "load_format": "dummy"}
    model = load_model(config, **options)
    packed = [
        layer.path
        for layer in model.modules()
        if isinstance(layer, MatrixLayer) and "weight" not in layer.stored_tensors("weight", ())
    ]
    names = ("gate_up_proj", "down_proj")
    assert packed == [
        f"model.layers.{n}.mlp.experts.{name}" for n in range(LAYERS) for name in names
    ]
    held, counted = held_weight_bytes(model), count_weight_bytes(config, **options)
    assert counted == pytest.approx(held, rel=0.03)


@cache
def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("gate_up_proj_scales", None, "1 tensor missing"),
        ("down_proj_bias", None, "1 tensor missing"),
        ("down_proj_blocks", None, "does not explain the tensors of"),
        ("gate_up_proj_blocks", lambda x: x[:, :7].clone(), r"expected \[5, 576, 2, 16\], found"),
        ("down_proj_scales", lambda x: x[..., :3].clone(), r"found \[5, 64, 3\]"),
        ("down_proj_scales", lambda x: x.half(), "expected torch.uint8, found torch.float16"),
        ("gate_up_proj_bias", lambda x: x[:, 1:].clone(), r"expected \[5, 576\], found \[5, 575\]"),
        ("gate_up_proj_scales", lambda x: x.fill_(255), "infinite or no numbers"),
    ],
)
def test_damage_is_named_with_its_tensor(
    released: Path, tensor: str, change: Callable[[Tensor], Tensor] | None, message: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    stored = dict(_tensors(released))
    damaged = f"model.layers.1.mlp.experts.{tensor}"
    if change is None:
        del stored[damaged]
    else:
        stored[damaged] = change(stored[damaged].clone())
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((released / "config.json").read_text())
    with pytest.raises(ModelError, match=message) as caught:
        load_model(load_model_config(str(tmp_path)), dtype=torch.float32, device="cpu")
    named = damaged.removesuffix("_blocks") if change is None else damaged
    assert named in str(caught.value) and str(tmp_path) in str(caught.value)


def test_inputs_that_are_no_whole_blocks_are_refused(released: Path) -> None:
    config = load_model_config(str(released), hf_overrides={"intermediate_size": 280})
    with pytest.raises(ModelError, match=r"280 inputs.* 32, such as 288; check") as caught:
        load_model(config, dtype=torch.float32, device="cpu")
    assert str(released / "config.json") in str(caught.value)


def test_other_formats_do_not_stack_experts(released: Path) -> None:
    """Such as AWQ: each expert has tensors of its own there."""
    described = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["router"]}
    changed = {"quantization_config": {**described, "group_size": 32}}
    config = load_model_config(str(released), hf_overrides=changed, load_format="dummy")
    with pytest.raises(ModelError, match="read from MXFP4, not from awq, 4 bits"):
        load_model(config, dtype=torch.float32, device="cpu", load_format="dummy")


def test_configuration_of_the_released_sizes(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    released = {
        **CONFIG,
        "eos_token_id": 200002,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": 12 * kinds,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "sliding_window": 128,
        "vocab_size": 201088,
    }
    (tmp_path / "config.json").write_text(json.dumps(released))
    config = load_model_config(str(tmp_path), load_format="dummy")
    assert config.max_position_tokens == 131072 and config.eos_token_ids == (200002,)
    assert [config.layer_window(layer) for layer in range(24)] == 12 * [128, None]
    assert config.experts is not None
    assert (config.experts.count, config.experts.top_k) == (32, 4)
    assert config.experts.gate == ClampedGate(limit=7.0, slope=1.702)
    assert 20.8e9 < config.num_weights < 21e9


def test_what_is_left_out_is_as_in_transformers(tmp_path: Path) -> None:
    sizes = ("vocab_size", "num_hidden_layers", "num_key_value_heads", "hidden_size")
    given = {key: CONFIG[key] for key in (*sizes, "num_attention_heads", "intermediate_size")}
    usual = GptOssConfig(**given)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **given}))
    config = load_model_config(str(tmp_path), load_format="dummy")
    windows = {"sliding_attention": usual.sliding_window, "full_attention": None}
    found = [config.layer_window(layer) for layer in range(LAYERS)]
    assert found == [windows[kind] for kind in usual.layer_types]
    assert (config.head_dim, config.norm_eps) == (usual.head_dim, usual.rms_norm_eps)
    assert config.attention_bias == usual.attention_bias
    assert config.tie_word_embeddings == usual.tie_word_embeddings
    assert config.max_position_tokens == usual.max_position_embeddings
    assert config.experts is not None and config.experts.count == usual.num_local_experts
    assert config.experts.top_k == usual.num_experts_per_tok
    assert config.experts.gate == ClampedGate(usual.swiglu_limit, usual.swiglu_alpha)
    frequencies, magnitude = rotary_frequencies(64, config.rope_theta, config.rope_scaling)
    rotary = GptOssRotaryEmbedding(usual)
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(rotary.attention_scaling) == pytest.approx(1.3465736)


@pytest.mark.parametrize(
    ("key", "value"), [("swiglu_limit", -7.0), ("swiglu_limit", "7"), ("swiglu_alpha", [1.7])]
)
def test_bad_gates_are_named(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    with pytest.raises(ModelError, match=f"{key} must be a positive number"):
        load_model_config(str(tmp_path), load_format="dummy")
