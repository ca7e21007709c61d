"""`GGUFFile` and the translation of its metadata, against the gguf package and a real file."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.config.embedded import embedded_model_path
from quire.config.latent import LatentConfig
from quire.config.model import load_model_config
from quire.files.gguf import LOADABLE_TYPES, TENSOR_TYPES, GGUFFile
from quire.protocol.errors import ModelError

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    tensors: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """A two-layer file of the given architecture; `metadata` adds or replaces its numbers."""
    writer = gguf.GGUFWriter(path, arch)
    numbers: dict[str, Any] = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
    }
    numbers.update({key.replace("__", "."): value for key, value in metadata.items()})
    for key, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_token_list(["a", "b", "Ġé", "日本"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_bool("general.flag", True)
    for name, value in (tensors or {"token_embd.weight": np.ones((20, 32), np.float32)}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    values = np.arange(20 * 32, dtype=np.float32).reshape(20, 32)
    quantised = gguf.quants.quantize(values, Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_token_list(["a", "b", "Ġé", "日本"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float64("double", 0.1)
    writer.add_bool("flag", True)
    writer.add_int8("negative", -5)
    writer.add_uint64("large", 2**60)
    writer.add_string("text", "häß")
    writer.add_tensor("token_embd.weight", values)
    writer.add_tensor("quantised", quantised, raw_dtype=Q8_0)
    writer.add_tensor("odd", np.arange(3, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


def test_values_and_tensors_come_back(small: Path) -> None:
    """All kinds of metadata and tensors read as they were written."""
    file = GGUFFile(small)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b", "Ġé", "日本"]
    assert file.metadata["numbers"].tolist() == [1, 2, 3]
    assert file.metadata["double"] == 0.1
    assert file.metadata["flag"] is True
    assert file.metadata["negative"] == -5
    assert file.metadata["large"] == 2**60
    assert file.metadata["text"] == "häß"
    assert "absent" not in file.metadata
    assert file.tensors["quantised"].type == "Q8_0"
    assert file.tensors["quantised"].shape == (20, 32)
    assert file.data("odd").view(np.float16).tolist() == [0, 1, 2]
    values = file.data("token_embd.weight").view(np.float32).reshape(20, 32)
    assert np.array_equal(values, np.arange(20 * 32).reshape(20, 32))
    assert not values.flags.writeable


def test_agrees_with_the_gguf_package_on_the_embedded_model() -> None:
    """Every key and every tensor of a real file; samples of vocabulary and merges."""
    ours, theirs = GGUFFile(embedded_model_path()), gguf.GGUFReader(embedded_model_path())
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        value, field = ours.metadata[key], theirs.fields[key]
        if isinstance(value, (list, np.ndarray)):
            assert len(value) == len(field.data)
            # The package takes seconds for whole vocabularies; the last entry proves the walk.
            for i in [*range(0, len(value), 101), len(value) - 1]:
                assert value[i] == field.contents(i)
        else:
            assert value == field.contents()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type, info.offset) == (tensor.tensor_type.name, tensor.data_offset)
        assert info.nbytes == tensor.n_bytes


def test_type_table_is_ggmls() -> None:
    for number, (name, elements, size) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (elements, size)
    assert set(LOADABLE_TYPES) <= {name for name, _, _ in TENSOR_TYPES.values()}


def test_every_truncation_is_an_error_that_names_the_file(small: Path) -> None:
    """Wherever a download stopped, in the header or in the data, opening the file notices."""
    whole = small.read_bytes()
    file = GGUFFile(small)
    needed = max(tensor.offset + tensor.nbytes for tensor in file.tensors.values())
    cut = small.with_name("cut.gguf")
    header = min(tensor.offset for tensor in file.tensors.values())
    for length in [*range(0, header, 3), *range(header, needed, 97), needed - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf.*(download|convert)"):
            GGUFFile(cut)


def test_damaged_headers_never_escape_as_other_errors(tmp_path: Path) -> None:
    """Random damage gives a file that still parses or a ModelError, never another exception."""
    good = write_gguf(tmp_path / "good.gguf", rope__scaling__type="linear", expert_count=0)
    whole = good.read_bytes()
    header_bytes = min(tensor.offset for tensor in GGUFFile(good).tensors.values())
    chance = random.Random(0)
    bad = tmp_path / "bad.gguf"
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        position = chance.randrange(header_bytes)
        junk = chance.choice([b"\xff" * 8, bytes([chance.randrange(256)]), b"\x00" * 4])
        damaged[position : position + len(junk)] = junk
        bad.write_bytes(damaged)
        try:
            dict(GGUFFile(bad).metadata)
            load_model_config(str(bad))
        except ModelError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**50, 1) + bytes(100), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**50) + bytes(100), "metadata entries"),
    ],
)
def test_what_is_not_gguf_is_said_to_be_so(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        load_model_config(str(path))
    assert str(path) in str(caught.value)


def test_embedded_model_configuration() -> None:
    """The published facts of SmolLM2-135M-Instruct."""
    config = load_model_config(None)
    assert config.source.kind == "gguf"
    assert (config.architecture, config.model_type) == ("LlamaForCausalLM", "llama")
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.rope_scaling, config.norm_eps) == (100000.0, None, 1e-5)
    assert (config.vocab_size, config.max_position_tokens) == (49152, 8192)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert (config.hidden_act, config.dtype) == ("silu", "float32")


def test_llama_metadata(tmp_path: Path) -> None:
    """Key/value heads default to heads, head size to width / heads; end ids are collected."""
    config = load_model_config(str(write_gguf(tmp_path / "m.gguf")))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 8)
    assert (config.vocab_size, config.rope_theta, config.norm_eps) == (20, 10000.0, 1e-5)
    assert config.eos_token_ids == (2, 3)
    assert config.raw["rms_norm_eps"] == 1e-5


def test_head_size_and_window_from_metadata(tmp_path: Path) -> None:
    """`attention.key_length` beats width / heads; a window makes a llama file a Mistral."""
    numbers = {"attention__key_length": 16, "attention__head_count_kv": 2}
    path = write_gguf(tmp_path / "m.gguf", **numbers, attention__sliding_window=24)
    config = load_model_config(str(path))
    assert (config.head_dim, config.num_kv_heads) == (16, 2)
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 24)


def test_output_tensor_unties_and_types_give_the_dtype(tmp_path: Path) -> None:
    tensors = {
        name: np.ones((20, 32), np.float16) for name in ("token_embd.weight", "output.weight")
    }
    config = load_model_config(str(write_gguf(tmp_path / "m.gguf", tensors=tensors)))
    assert not config.tie_word_embeddings
    assert config.dtype == "float16"


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gpt2"])
def test_other_architectures(tmp_path: Path, arch: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, rope__freq_base=1e6, attention__key_length=16)
    config = load_model_config(str(path))
    assert config.model_type == arch
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (2, 32, 48)
    assert config.max_position_tokens == 64
    if arch == "gpt2":
        assert (config.hidden_act, config.head_dim, config.norm_eps) == ("gelu_new", 8, 1e-5)
    else:
        assert (config.rope_theta, config.head_dim) == (1e6, 16)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", rope__scaling__type="linear", rope__scaling__factor=4.0)
    config = load_model_config(str(path))
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    assert config.max_position_tokens == 256


def llama3_factors(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """Llama 3.1's published rule, as a loop over frequencies."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recovered_from_its_tensor(tmp_path: Path, factor: float) -> None:
    """GGUF stores Llama 3.1's scaling as a tensor of factors; the rule behind it is given back."""
    tensors = {
        "token_embd.weight": np.ones((20, 32), np.float32),
        "rope_freqs.weight": llama3_factors(64, 500000.0, factor, 8192),
    }
    numbers = {"attention__key_length": 64, "rope__freq_base": 500000.0}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, **numbers)
    config = load_model_config(str(path))
    assert config.rope_scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert config.max_position_tokens == 64

    tensors["rope_freqs.weight"] = np.linspace(1, factor, 32, dtype=np.float32)
    path = write_gguf(tmp_path / "other.gguf", tensors=tensors, **numbers)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        load_model_config(str(path))


EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "expert_feed_forward_length": 16,
    "expert_shared_count": 1,
}


def test_latents_and_experts_of_old_and_new_files(tmp_path: Path) -> None:
    """Old files give a head's keys and values under the names that now are those of latents."""
    old = load_model_config(str(write_gguf(tmp_path / "old.gguf", "deepseek2", **LATENT)))
    newer = {
        **LATENT,
        "attention.key_length": 40,
        "attention.value_length": 32,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 16,
        "expert_gating_func": 2,
        "expert_group_count": 2,
        "expert_group_used_count": 1,
        "expert_weights_scale": 2.5,
        "leading_dense_block_count": 1,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    }
    new = load_model_config(str(write_gguf(tmp_path / "new.gguf", "deepseek2", **newer)))
    assert old.latent == new.latent == LatentConfig(None, 32, 16, 8, 16)
    assert (old.model_type, new.model_type) == ("deepseek_v2", "deepseek_v3")
    assert old.experts is not None and new.experts is not None
    assert old.experts.is_sparse == (True, True) and new.experts.is_sparse == (False, True)
    assert (old.experts.num_groups, old.experts.factor, old.experts.normalizes) == (1, 1.0, False)
    assert (new.experts.num_groups, new.experts.top_groups, new.experts.factor) == (2, 1, 2.5)
    assert new.rope_scaling is not None
    assert new.rope_scaling["mscale"] == new.rope_scaling["mscale_all_dim"] == 0.707


@pytest.mark.parametrize(
    ("pattern", "full"), [(None, [5]), (3, [2, 5]), ([True, False] * 3, [1, 3, 5])]
)
def test_windows_of_gemma3(tmp_path: Path, pattern: Any, full: list[int]) -> None:
    """One base of RoPE is not stored; old files have no pattern; without a window all are full."""
    numbers = {"block_count": 6, "attention.key_length": 8}
    path = write_gguf(
        tmp_path / "m.gguf",
        "gemma3",
        attention__sliding_window=16,
        attention__sliding_window_pattern=pattern,
        **numbers,
    )
    config = load_model_config(str(path))
    assert [layer for layer in range(6) if config.layer_window(layer) is None] == full
    assert config.sliding_window == 16 and config.raw["rope_local_base_freq"] == 10000.0
    path = write_gguf(tmp_path / "full.gguf", "gemma3", **numbers)
    assert load_model_config(str(path)).sliding_window is None


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_scores_by_width(tmp_path: Path, arch: str, layers: int) -> None:
    for count, scalar in ((layers, 8), (layers + 1, 12)):
        path = write_gguf(
            tmp_path / f"{count}.gguf",
            arch,
            block_count=count,
            attention__key_length=12,
            attention__sliding_window=4,
        )
        assert load_model_config(str(path)).raw["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("arch", "metadata", "problem"),
    [
        ("mamba", {}, "mamba.*llama, qwen2, .*gemma3, phi3, deepseek2, gpt-oss, gpt2"),
        ("llama", {"block_count": None}, r"llama\.block_count is missing"),
        ("llama", {"attention.head_count": [4, 2]}, "head_count"),
        ("llama", {"attention.head_count": 0}, "num_attention_heads"),
        ("llama", {"attention.head_count_kv": 3}, "num_key_value_heads"),
        ("llama", {"expert_count": 8}, r"llama\.expert_used_count is missing"),
        ("llama", {"attention.value_length": 16}, "value_length must be 8"),
        ("llama", {"rope.dimension_count": 4}, "partial_rotary_factor"),
        ("llama", {"rope.scaling.type": "longrope"}, "none, linear or yarn"),
        ("llama", {"attention.clamp_kqv": 8.0}, r"llama\.attention\.clamp_kqv must be 0"),
        ("qwen2", {"expert_count": 4}, "expert_count must be 0 .*qwen2 has no use for it"),
        ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be 0"),
        (
            "qwen3moe",
            {**EXPERTS, "expert_feed_forward_length": 8, "expert_gating_func": 2},
            "expert_gating_func must be 0 or 1",
        ),
        ("qwen3moe", EXPERTS, r"blk\.0\.ffn_gate_exps\.weight is missing"),
        ("gemma2", {}, r"gemma2\.attention\.sliding_window is missing"),
        ("phi3", {}, r"phi3\.attention\.sliding_window is missing"),
        ("gemma3", {"attention.sliding_window_pattern": "swa"}, "a number of layers, got 'swa'"),
        ("deepseek2", {}, r"deepseek2\.attention\.key_length is missing"),
        ("deepseek2", {**LATENT, "expert_gating_func": 3}, "softmax.*sigmoid.*got 3"),
        ("deepseek2", {**LATENT, "nextn_predict_layers": 1}, "nextn_predict_layers must be 0"),
    ],
)
def test_metadata_that_cannot_be_used(
    tmp_path: Path, arch: str, metadata: dict[str, Any], problem: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, **metadata)
    with pytest.raises(ModelError, match=problem) as caught:
        load_model_config(str(path))
    assert str(path) in str(caught.value)


def test_unsupported_tensor_types_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.IQ4_XS
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 136), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight has type IQ4_XS.*Q6_K"):
        load_model_config(str(path))


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"2 parts.*merge"):
        load_model_config(str(path))
