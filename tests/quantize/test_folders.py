"""Folders that `quire quantize` writes, read by transformers with compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import disable_quantization
from compressed_tensors.utils.match import match_targets
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quire.cli import main
from quire.config.model import load_model_config
from quire.models.loader import load_model
from quire.protocol.errors import ModelError, OptionError
from quire.quantize import command, shards
from quire.quantize.calibrate import Adjustment, calibrate
from quire.quantize.command import Summary, quantize
from quire.quantize.methods import make_method
from tests.models.reference import random_tokens, reference_logits
from tests.tiny import save_tiny, text_ids

TOKENS = random_tokens(24)
METHODS = [("fp8", None), ("w8a8", None), ("w4a16", 32)]


def read_folder(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def dequantized(folder: Path) -> dict[str, Tensor]:
    """The numbers that a folder stands for, as compressed-tensors describes them."""
    stored, found = read_folder(folder), {}
    for name, tensor in stored.items():
        layer, _, parameter = name.rpartition(".")
        if parameter == "weight_packed":
            num_outputs, num_inputs = stored[f"{layer}.weight_shape"].tolist()
            nibbles = torch.stack([(tensor >> (4 * place)) & 15 for place in range(8)], -1)
            codes = nibbles.view(num_outputs, -1)[:, :num_inputs] - 8
            scales = stored[f"{layer}.weight_scale"].float()
            group = num_inputs // scales.shape[1]
            found[f"{layer}.weight"] = codes * scales.repeat_interleave(group, 1)
        elif parameter == "weight" and f"{layer}.weight_scale" in stored:
            found[name] = tensor.float() * stored[f"{layer}.weight_scale"]
        elif parameter not in ("weight_scale", "weight_shape"):
            found[name] = tensor.float()
    return found


def with_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("lm_head" in name for name in missing)
    return model


def read_by_transformers(folder: Path) -> PreTrainedModel:
    """Its weights alone: rounding of inputs is turned off."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference_logits(model, TOKENS)  # weights are decompressed at the first call
    return model.apply(disable_quantization)


def save_uneven(folder: Path, family: str) -> PreTrainedModel:
    """A model some of whose inputs are far larger than others."""
    model = save_tiny(folder, family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight") and parameter.numel() == 64:
                parameter[::16] *= 12
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("method", "group_size"), METHODS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_transformers_reads_the_same_numbers(
    tmp_path: Path, family: str, method: str, group_size: int | None
) -> None:
    model = save_tiny(tmp_path / "model", family)
    out = tmp_path / "out"
    summary = quantize(str(tmp_path / "model"), str(out), method, group_size=group_size)
    exact = reference_logits(model, TOKENS)
    expected = reference_logits(with_weights(model, dequantized(out)), TOKENS)
    read = read_by_transformers(out)
    assert torch.allclose(reference_logits(read, TOKENS), expected, atol=1e-3, rtol=1e-3)
    assert 0 < (expected - exact).abs().max() < exact.abs().max()
    num_linears = 18 if family == "opt" else 21
    assert len(summary.errors) == num_linears
    names = read_folder(out)
    assert sum(name.endswith("weight_scale") for name in names) == num_linears
    assert not any("lm_head" in name or "embed" in name for name in names if "scale" in name)
    assert AutoTokenizer.from_pretrained(out)("a small text").input_ids == text_ids("a small text")


@pytest.mark.parametrize(
    ("family", "method", "group_size"),
    [("llama", "w4a16", 32), ("qwen3", "w8a8", None), ("qwen2", "w4a16", 32), ("opt", "w4a16", 32)],
)
def test_calibration_lessens_the_error_of_outputs(
    tmp_path: Path, family: str, method: str, group_size: int | None
) -> None:
    model = save_uneven(tmp_path / "model", family)
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"prompt": "the quick brown fox jumps over " * n}) for n in range(1, 9)]
    text.write_text("\n".join(lines) + "\n")
    exact = reference_logits(model, TOKENS).log_softmax(-1)
    divergences = []
    for name, calibrate_file in (("plain", None), ("calibrated", str(text))):
        out = tmp_path / name
        options: dict[str, Any] = {"group_size": group_size, "calibrate_file": calibrate_file}
        quantize(str(tmp_path / "model"), str(out), method, **options)
        made = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        logprobs = reference_logits(made, TOKENS).log_softmax(-1)
        divergences.append(float((exact.exp() * (exact - logprobs)).sum(-1).mean()))
    plain, calibrated = divergences
    # Layers of OPT are not scaled; only their clipping ranges follow the inputs of these prompts.
    assert calibrated < (2 if family == "opt" else 0.8) * plain
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_scaling_by_itself_changes_nothing(tmp_path: Path, family: str) -> None:
    """What weights are multiplied by is divided out by what comes before them."""
    model = save_uneven(tmp_path, family)
    expected = reference_logits(model, TOKENS)
    windows = [random_tokens(40, seed) for seed in range(4)]
    adjustments = calibrate(
        load_model_config(tmp_path),
        windows,
        make_method("w4a16", 32),
        torch.float32,
        torch.device("cpu"),
        lambda line: None,
    )
    weights = dict(model.named_parameters())
    changed = {
        name: Adjustment(one.times_inputs, one.over_outputs).apply(weights[name].detach())
        for name, one in adjustments.items()
    }
    layers = {
        name.split(".", 3)[3] for name, one in adjustments.items() if one.times_inputs is not None
    }
    assert layers == {
        f"{layer}.weight"
        for layer in (
            *(f"self_attn.{one}_proj" for one in "qkvo"),
            *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
        )
    }
    model.load_state_dict(changed, strict=False)
    torch.testing.assert_close(reference_logits(model, TOKENS), expected, atol=1e-3, rtol=1e-3)


def test_shards_and_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 40_000)
    save_tiny(tmp_path / "model", shards=True)
    quantize(str(tmp_path / "model"), str(tmp_path / "out"), "fp8")
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = read_folder(tmp_path / "out")
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    model = read_by_transformers(tmp_path / "out")
    assert reference_logits(model, TOKENS).isfinite().all()


def test_other_files_come_along(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    save_tiny(folder)
    (folder / "LICENSE").write_text("words")
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    out.mkdir()
    quantize(str(folder), str(out), "w4a16", group_size=32)
    assert (out / "LICENSE").read_text() == "words" and not (out / "pytorch_model.bin").exists()
    before, after = (json.loads((one / "config.json").read_text()) for one in (folder, out))
    config = after.pop("quantization_config")
    assert after == {**before, "dtype": "bfloat16"}
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], config["ignore"]) == (4, 32, ["lm_head"])


@pytest.mark.parametrize("family", ["gemma3", "glm4_moe"])
def test_other_parts_of_a_model_are_copied(family: str, tmp_path: Path) -> None:
    """A tower of vision, and layers that predict further tokens: config.json goes on to name them,
    so dropping them leaves a folder that others cannot read."""
    folder, out = tmp_path / "model", tmp_path / "out"
    changes = {"num_nextn_predict_layers": 1} if family == "glm4_moe" else {}
    save_tiny(folder, family, **changes)
    tensors = load_file(folder / "model.safetensors")
    if family == "gemma3":
        module = "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
        others = {f"{module}.weight": torch.randn(8, 8), f"{module}.bias": torch.randn(8)}
    else:
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        module = f"model.layers.{layers}.eh_proj"
        others = {f"{module}.weight": torch.randn(8, 16)}
    unused = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors, **others, **unused}, folder / "model.safetensors", {"format": "pt"})
    before = quantize(str(folder), str(out), "fp8").bytes_before
    assert before == sum(one.nbytes for one in (*tensors.values(), *others.values()))
    written = read_folder(out)
    assert all(torch.equal(written[name], tensor) for name, tensor in others.items())
    assert not unused.keys() & written.keys()
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    linear = torch.nn.Linear(1, 1)
    assert match_targets(module, linear, ignored)
    assert match_targets(f"model.{module}", linear, ignored)
    assert not match_targets("model.layers.0.self_attn.q_proj", linear, ignored)
    load_model(load_model_config(str(out)), dtype=torch.float32, device="cpu")


def test_mistakes_are_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    save_tiny(folder)
    name = str(folder)

    def refused(error: type[Exception], message: str, *words: Any, **options: Any) -> None:
        with pytest.raises(error, match=message):
            quantize(*words, **options)
        assert not out.exists()

    inputs = "down_proj.weight has 96 inputs, which is no multiple of --group-size 64; use.*32"
    refused(OptionError, inputs, name, str(out), "w4a16", group_size=64)
    refused(OptionError, "--method must be fp8, w8a8 or w4a16, got 'q'", name, str(out), "q")
    refused(OptionError, "one of .*, got 48", name, str(out), "w4a16", group_size=48)
    refused(OptionError, "--group-size 32 is for", name, str(out), "fp8", group_size=32)
    refused(OptionError, "'model' exists|exists and is not", name, name, "fp8")
    refused(OptionError, "--calibrate", name, str(out), "fp8", calibrate_file="none.txt")
    refused(OptionError, "--device 'tpu' was not found", name, str(out), "fp8", device="tpu")
    usage = command.shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(command.shutil, "disk_usage", lambda path: usage)
        refused(OptionError, "would take .* bytes, and 1,000 are free", name, str(out), "fp8")
    save_tiny(tmp_path / "gpt2", "gpt2")
    refused(ModelError, "GPT2LMHeadModel", str(tmp_path / "gpt2"), str(out), "fp8")
    quantize(name, str(tmp_path / "made"), "fp8")
    refused(ModelError, "quantised already", str(tmp_path / "made"), str(out), "fp8")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.weight.* output 3 and input 5"):
        quantize(str(folder), str(tmp_path / "out"), "w4a16", group_size=32)
    assert not list((tmp_path / "out").iterdir()), "the same name can be used again"


def test_summary_names_the_worst(tmp_path: Path) -> None:
    errors = {f"layer.{i}": i / 100 for i in range(8)}
    lines = Summary(4_000_000, 1_000_000, errors).lines()
    assert lines[0].startswith("4 MB became 1 MB; 8 matrices") and "3.50%" in lines[0]
    assert [line.split() for line in lines[1:]] == [
        [f"layer.{i}", f"{i}.00%"] for i in (7, 6, 5, 4, 3)
    ]


@pytest.mark.parametrize(("method", "group_size"), METHODS)
def test_quire_computes_with_what_it_wrote(
    tmp_path: Path, method: str, group_size: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line: quantise, then measure; transformers finds about the same, or more
    where it rounds inputs to fp8 and the native library does so more finely."""
    model, out = tmp_path / "model", tmp_path / "out"
    reference = save_tiny(model)
    words = ["quantize", str(model), str(out), "--method", method]
    assert main([*words, *(["--group-size", str(group_size)] if group_size else [])]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "21 matrices are quantised" in printed[0] and printed[-1] == str(out)
    text = "A text of some length, whose tokens are predicted one by one, by both of them."
    (tmp_path / "text.jsonl").write_text(json.dumps(text))
    words = [
        "quality",
        str(out),
        "--against",
        str(model),
        "--prompts",
        str(tmp_path / "text.jsonl"),
    ]
    words += ["--json", str(tmp_path / "found.json"), "--quiet", "--kv-cache-memory-bytes", "32MiB"]
    assert main(words) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    ids = text_ids(text)
    made = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    base, logprobs = (reference_logits(one, ids)[:-1].log_softmax(-1) for one in (reference, made))
    divergence = float((base.exp() * (base - logprobs)).sum(-1).mean())
    assert (0.5 if method == "fp8" else 0.7) < found["kl_mean"] / divergence < 1.3
