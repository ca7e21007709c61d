"""`quire lora merge`: what it writes is what peft computes with base and adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire import SamplingParams
from quire.cli import main
from quire.config.locate import locate_model
from quire.loading.weights import read_weights
from quire.lora.merge import merge
from quire.protocol.errors import AdapterError, ModelError, OptionError
from quire.quantize import shards
from tests.adapters import ATTENTION, LAYOUTS, MLP, make_adapter
from tests.models.reference import random_model, random_tokens, reference_logits
from tests.tiny import is_greedy, save_tiny, tiny_llm

TOKENS = random_tokens(18)
READ_BY_QUIRE = ("ends_dora", "gpt_oss")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TIED = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "saved_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "neither": {"target_modules": ["q_proj"]},
}


def loaded(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")
    return model.eval()


def generated(folder: Path) -> list[int]:
    with tiny_llm(folder, dtype="float32") as llm:
        output = llm.generate({"prompt_token_ids": TOKENS}, GREEDY, use_tqdm=False)[0]
        return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, tmp_path: Path) -> None:
    """transformers, and Quire with all that differ in how they are stored, read the folder and
    compute what peft does without merging."""
    family, config = LAYOUTS[layout]
    base = save_tiny(tmp_path / "base", family)
    model = make_adapter(base, tmp_path / "adapter", **config)
    merge(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "out"))
    wanted = reference_logits(model, TOKENS)
    assert not torch.allclose(wanted, reference_logits(base, TOKENS), atol=0.05)
    torch.testing.assert_close(
        reference_logits(loaded(tmp_path / "out"), TOKENS), wanted, atol=1e-4, rtol=1e-4
    )
    if layout in READ_BY_QUIRE:
        assert is_greedy(model, TOKENS, generated(tmp_path / "out"))


@pytest.mark.parametrize("case", TIED)
def test_tied_heads(case: str, tmp_path: Path) -> None:
    """A head that is the embedding gets weights of its own once an adapter changes one of them,
    since peft does not change the other."""
    base = save_tiny(tmp_path / "base", "llama", tie_word_embeddings=True)
    model = make_adapter(base, tmp_path / "adapter", **TIED[case])
    summary = merge(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "out"))
    assert summary.is_untied == (case != "neither")
    torch.testing.assert_close(
        reference_logits(loaded(tmp_path / "out"), TOKENS),
        reference_logits(model, TOKENS),
        atol=1e-4,
        rtol=1e-4,
    )
    if case == "head":
        assert is_greedy(model, TOKENS, generated(tmp_path / "out"))


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards in, shards out; the tokenizer comes along; other files of the base do not."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 60_000)
    base = save_tiny(tmp_path / "base", shards=True)
    model = make_adapter(base, tmp_path / "adapter", target_modules=[*ATTENTION, *MLP])
    names = [str(tmp_path / name) for name in ("base", "adapter", "out")]
    assert main(["lora", "merge", *names, "--dtype", "bfloat16", "--quiet"]) == 0
    assert "21 modules are merged" in capsys.readouterr().out
    out = tmp_path / "out"
    assert (out / "model.safetensors.index.json").is_file()
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 3
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "base/tokenizer.json").read_bytes()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    found = loaded(out)
    assert found.dtype == torch.bfloat16
    wanted = model.merge_and_unload().state_dict()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name].bfloat16(), atol=0, rtol=0.01)


def test_types_of_the_base_are_kept(tmp_path: Path) -> None:
    """bfloat16 is added up in float32 and rounded once."""
    base = random_model("llama").bfloat16()
    base.save_pretrained(tmp_path / "base")
    model = make_adapter(base.float(), tmp_path / "adapter", target_modules=ATTENTION)
    merge(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "out"))
    wanted = model.merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), wanted[name], atol=1e-3, rtol=0.01)


def test_refusals(tmp_path: Path) -> None:
    """Nothing is written for what cannot be merged, and the error names the modules."""
    base = save_tiny(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    names = [str(tmp_path / name) for name in ("base", "adapter", "out")]
    with pytest.raises(OptionError, match="--dtype must be"):
        merge(*names, dtype="int8")
    with pytest.raises(OptionError, match="exists and is not an empty folder"):
        merge(names[0], names[1], names[0])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    other = {name.replace("layers.2.", "layers.9."): tensor for name, tensor in tensors.items()}
    save_file(other, file)
    with pytest.raises(AdapterError, match=r"lacks model\.layers\.9\.self_attn\.q_proj; give"):
        merge(*names)
    wide = {
        name: torch.cat([tensor, tensor], 0) if "lora_B" in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(wide, file)
    with pytest.raises(AdapterError, match=r"other sizes have .*q_proj \(weight of the base: \[64"):
        merge(*names)
    save_file(tensors, file)
    config = tmp_path / "base" / "config.json"
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    settings = {**json.loads(config.read_text()), "quantization_config": quantised}
    config.write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="is quantised"):
        merge(*names)
    assert not (tmp_path / "out").exists()


def test_a_bias_without_one_in_the_base(tmp_path: Path) -> None:
    """Llama's layers have no biases to add one to."""
    base = save_tiny(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter", target_modules=["up_proj"], lora_bias=True)
    with pytest.raises(AdapterError, match=r"the base lacks model\.layers\.0\.mlp\.up_proj"):
        merge(*(str(tmp_path / name) for name in ("base", "adapter", "out")))


@pytest.mark.slow
def test_the_embedded_model(tmp_path: Path) -> None:
    """A GGUF file is dequantised, and the folder is a plain one that transformers reads."""
    source = locate_model(None)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    name, (inputs, outputs) = "model.layers.7.mlp.up_proj", (576, 1536)
    pair = {"lora_A": torch.randn(4, inputs), "lora_B": torch.randn(outputs, 4)}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({f"base_model.model.{name}.{own}.weight": pair[own] for own in pair}, file)
    merge(None, str(tmp_path / "adapter"), str(tmp_path / "out"))
    before = read_weights(source)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    delta = 2 * pair["lora_B"] @ pair["lora_A"]
    for own, weight in before.items():
        wanted = weight.float() + (delta if own == f"{name}.weight" else 0)
        torch.testing.assert_close(after[own].float(), wanted, atol=1e-2, rtol=1e-2)
