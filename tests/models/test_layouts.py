"""Folders laid out exactly like well-known models on the hub, with small random weights.

`LLM` reads them as they are: the same prompt tokens and the same greedy tokens as transformers, and
the scripts of the README run as plain files with the models' own names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel

from quire import SamplingParams
from tests.models.reference import random_model
from tests.text.tokenizer_samples import (
    LLAMA2_CONFIG,
    MISTRAL_CONFIG,
    llama_tokenizer_json,
    opt_folder,
    sentencepiece_folder,
    train_sentencepiece,
    write_json,
)
from tests.tiny import assert_at_rest, greedy, is_greedy, tiny_llm

PROMPTS = ["The future of AI is", "How does PagedAttention work?", "import argparse", "1 + 1 = 2"]


@dataclass
class Layout:
    folder: Path
    model: PreTrainedModel
    """transformers' model with the weights as they are stored."""


def tensors_of(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights as stored; those of `model` are rounded alike."""
    stored = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    return {name: tensor.clone() for name, tensor in stored.items()}


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int, first: int = 1) -> None:
    """`model-00001-of-0000N.safetensors` and so on, with their index."""
    names = list(tensors)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + first:05}-of-{count + first - 1:05}.safetensors"
        part = {name: tensors[name] for name in names[i::count]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def opt_125m(folder: Path) -> Layout:
    """Only `pytorch_model.bin`, in half precision under `decoder.`; no tokenizer.json; an embedding
    larger than the vocabulary."""
    opt_folder(folder)
    sizes = {
        "vocab_size": 808,
        "hidden_size": 48,
        "word_embed_proj_dim": 48,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    model = random_model("opt", **sizes)
    config = {
        "_name_or_path": "facebook/opt-125m",
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "model_type": "opt",
        "prefix": "</s>",
        "torch_dtype": "float16",
        "transformers_version": "4.21.0.dev0",
        "use_cache": True,
        **sizes,
    }
    write_json(folder / "config.json", config)
    ids = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    stored = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors_of(model, torch.float16).items()
    }
    torch.save(stored, folder / "pytorch_model.bin")
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "merges.txt",
        "pytorch_model.bin",
        "special_tokens_map.json",
        "tokenizer_config.json",
        "vocab.json",
    }
    return Layout(folder, model)


def _llama_like(
    folder: Path, family: str, tokenizer_config: dict[str, Any], tokenizer_model: Path
) -> tuple[PreTrainedModel, dict[str, Any]]:
    bare = sentencepiece_folder(folder / "bare", family, tokenizer_config, tokenizer_model)
    published = llama_tokenizer_json(bare)
    sentencepiece_folder(folder / "model", family, tokenizer_config, tokenizer_model, published)
    sizes = {
        "vocab_size": 700,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    common = {
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        **sizes,
    }
    return random_model(family, **sizes), common


def llama_2_70b(folder: Path, tokenizer_model: Path) -> Layout:
    """Shards of half-precision safetensors with the rotary buffers of old files, tokenizer.model,
    and sampling defaults in generation_config.json."""
    model, config = _llama_like(folder, "llama", LLAMA2_CONFIG, tokenizer_model)
    folder = folder / "model"
    model.config.max_position_embeddings = 4096
    config |= {
        "_name_or_path": "meta-llama/Llama-2-70b-hf",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float16",
        "transformers_version": "4.32.0.dev0",
    }
    write_json(folder / "config.json", config)
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    write_json(folder / "generation_config.json", {**ids, **sampling})
    tensors = tensors_of(model, torch.float16)
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_shards(folder, tensors, 5)
    return Layout(folder, model)


def mistral_7b(folder: Path, tokenizer_model: Path) -> Layout:
    """Two shards in bfloat16, a sliding window."""
    model, config = _llama_like(folder, "mistral", MISTRAL_CONFIG, tokenizer_model)
    folder = folder / "model"
    for name, value in (("sliding_window", 12), ("max_position_embeddings", 32768)):
        setattr(model.config, name, value)
        config[name] = value
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
    }
    write_json(folder / "config.json", config)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    save_shards(folder, tensors_of(model, torch.bfloat16), 2)
    return Layout(folder, model)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Layout]:
    root = tmp_path_factory.mktemp("layouts")
    tokenizer_model = train_sentencepiece(root / "tokenizer.model", "bpe")
    return {
        "facebook/opt-125m": opt_125m(root / "opt"),
        "meta-llama/Llama-2-70b-hf": llama_2_70b(root / "llama", tokenizer_model),
        "mistralai/Mistral-7B-v0.1": mistral_7b(root / "mistral", tokenizer_model),
    }


NAMES = ["facebook/opt-125m", "meta-llama/Llama-2-70b-hf", "mistralai/Mistral-7B-v0.1"]


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_read_as_transformers_reads_it(name: str, layouts: Any) -> None:
    layout: Layout = layouts[name]
    theirs = AutoTokenizer.from_pretrained(layout.folder)
    prompts = [theirs(text)["input_ids"] for text in PROMPTS]
    expected = greedy(layout.model, prompts, 32)
    wanted = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with tiny_llm(layout.folder, max_model_len=512) as llm:
        outputs = llm.generate(PROMPTS, wanted, use_tqdm=False)
        for prompt, tokens, output in zip(prompts, expected, outputs, strict=True):
            assert output.prompt_token_ids == prompt
            made = output.outputs[0].token_ids
            assert made == tokens or is_greedy(layout.model, prompt, made)
            assert (
                output.outputs[0].text.strip()
                == theirs.decode(
                    made, skip_special_tokens=True, clean_up_tokenization_spaces=False
                ).strip()
            )
        assert llm.get_tokenizer().eos_token_id == theirs.eos_token_id
        assert_at_rest(llm)


def test_prompts_and_defaults_of_the_models(layouts: Any) -> None:
    """OPT prepends `</s>`, Llama `<s>`; Llama 2 recommends a temperature and a top_p."""
    with tiny_llm(layouts[NAMES[0]].folder, max_model_len=64) as llm:
        (output,) = llm.generate("Hello", use_tqdm=False)
        assert output.prompt_token_ids[0] == llm.get_tokenizer().eos_token_id == 2
        assert llm.get_default_sampling_params() == SamplingParams()
    with tiny_llm(layouts[NAMES[1]].folder, max_model_len=64) as llm:
        (output,) = llm.generate("Hello", use_tqdm=False)
        assert output.prompt_token_ids[0] == llm.get_tokenizer().bos_token_id == 1
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.9)


# --- scripts --------------------------------------------------------------------------------------

FIRST = """
from quire import LLM, SamplingParams
llm = LLM(model="facebook/opt-125m")            # LLM() alone uses the embedded model
outputs = llm.generate(["The future of AI is", "How does PagedAttention work?"],
                       SamplingParams(temperature=0.7, top_p=0.9, max_tokens=128))
for o in outputs: print(o.prompt, o.outputs[0].text)
"""
SECOND = """
from quire import LLM, SamplingParams
llm = LLM(model="meta-llama/Llama-2-70b-hf", tensor_parallel_size=2, gpu_memory_utilization=0.90,
          max_num_seqs=256, max_num_batched_tokens=8192, block_size=16)
outputs = llm.generate(["Explain quantum entanglement", "Write a haiku about AI"] * 128,
                       SamplingParams(temperature=0.8, top_p=0.95, max_tokens=512))
print(len(outputs), sorted({o.prompt for o in outputs}))
"""


def hub_cache(root: Path, layouts: dict[str, Layout]) -> Path:
    """What huggingface_hub keeps of models it has downloaded."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    for name, layout in layouts.items():
        place = root / "hub" / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text(revision)
        snapshot, blobs = place / "snapshots" / revision, place / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for i, file in enumerate(sorted(layout.folder.iterdir())):
            blob = blobs / f"{i:040x}"
            blob.write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return root


@pytest.fixture(scope="module")
def run_script(
    layouts: dict[str, Layout], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    root = hub_cache(tmp_path_factory.mktemp("huggingface"), layouts)

    def run(text: str) -> subprocess.CompletedProcess[str]:
        file = root / "script.py"
        file.write_text(text)
        repository = str(Path(__file__).parents[2])
        environment = {
            **os.environ,
            "HF_HOME": str(root),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": repository,
        }
        environment.pop("HF_HUB_CACHE", None)
        return subprocess.run(
            [sys.executable, str(file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )

    return run


def test_the_first_script(run_script: Any) -> None:
    """As it stands, as a plain file, with the model's own name."""
    done = run_script(FIRST)
    assert done.returncode == 0, done.stderr
    assert "The future of AI is " in done.stdout and "How does PagedAttention work? " in done.stdout
    assert "2/2" in done.stderr, "the progress bar"
    assert "KV cache: " in done.stderr, "the start-up line"


@pytest.mark.slow
def test_the_second_script(run_script: Any) -> None:
    """As it stands, only shorter: with two ranks, and without an `if __name__` guard."""
    shorter = SECOND.replace("* 128", "* 8").replace("max_tokens=512", "max_tokens=16")
    done = run_script(shorter)
    assert done.returncode == 0, done.stderr
    assert "ranks: 2 on this host" in done.stderr, "the start-up line"
    assert "16 ['Explain quantum entanglement', 'Write a haiku about AI']" in done.stdout


def test_a_name_that_was_never_downloaded(run_script: Any) -> None:
    done = run_script('from quire import LLM\nLLM("facebook/opt-350m")')
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "facebook/opt-350m" in last and "ModelError" in last


def test_the_index_is_that_of_the_hub(layouts: Any) -> None:
    """The layouts are what they claim to be: an index that names every tensor once."""
    folder = layouts[NAMES[1]].folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f.name for f in folder.glob("*.safetensors")}
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" in index["weight_map"]
    assert (folder / "tokenizer.model").exists() and (folder / "tokenizer.json").exists()
