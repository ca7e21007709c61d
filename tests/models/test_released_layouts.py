"""Folders laid out exactly like released models, with small random weights: mixtures of experts,
and models with windows in some layers or for long contexts.

Names of tensors, shards with their index, keys of config.json, tokenizer and chat template are
those of the hub. `LLM` reads them as they are, and `LLM.chat` answers as transformers does.
"""
# ruff: noqa: RUF001  # DeepSeek's special tokens have bars that are as wide as letters

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from quire import SamplingParams
from quire.config.model import load_model_config
from quire.config.reply_formats import HARMONY
from quire.layers.parallel import Parallel
from quire.models.loader import load_model
from tests.layers.ranks import on_ranks
from tests.models.packers import MIXTRAL_NAMES, expert_tensors, scaled
from tests.models.reference import PagedRun, random_model, random_tokens, reference_logits
from tests.models.test_gpt_oss import CONFIG as RELEASED_GPT_OSS
from tests.models.test_gpt_oss import dequantized_model, released_tensors
from tests.models.test_layouts import Layout, save_shards, tensors_of
from tests.text.tokenizer_samples import (
    MISTRAL_CONFIG,
    flagged,
    llama_tokenizer_json,
    sentencepiece_folder,
    train_byte_level,
    train_sentencepiece,
    write_json,
)
from tests.text.tool_calls import templates
from tests.tiny import assert_at_rest, is_greedy, tiny_llm

CHAT = [
    {"role": "user", "content": "What is a quire?"},
    {"role": "assistant", "content": "A gathering of pages."},
    {"role": "user", "content": "Of how many?"},
]
Tensors = dict[str, torch.Tensor]


def byte_level_tokenizer(
    folder: Path, special: list[str], others: list[str], config: dict[str, Any]
) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE."""
    backend = train_byte_level(special)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in others])
    backend.save(str(folder / "tokenizer.json"))
    known = {backend.token_to_id(text): text for text in (*special, *others)}
    added = {str(number): flagged(text, special=text in special) for number, text in known.items()}
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": added, **config})


def mixtral_8x7b_instruct(folder: Path) -> Layout:
    config = {
        **MISTRAL_CONFIG,
        "chat_template": "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
        "{% endif %}{% endfor %}",
    }
    pieces = train_sentencepiece(folder / "pieces", "bpe")
    bare = sentencepiece_folder(folder / "bare", "mixtral", config, pieces)
    folder = sentencepiece_folder(
        folder / "model", "mixtral", config, pieces, llama_tokenizer_json(bare)
    )
    sizes = {
        "vocab_size": 700,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = random_model("mixtral", **sizes)
    described = {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "mixtral",
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        **sizes,
    }
    write_json(folder / "config.json", described)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    tensors_of(model, torch.bfloat16)
    tensors = expert_tensors(model, dtype=torch.bfloat16, names=MIXTRAL_NAMES)
    assert "model.layers.0.block_sparse_moe.experts.7.w2.weight" in tensors
    save_shards(folder, tensors, 19)
    return Layout(folder, model)


def qwen3_30b_a3b(folder: Path) -> Layout:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    template = (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' "
        "+ message.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    )
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    byte_level_tokenizer(folder, special, ["<think>", "</think>"], config)
    sizes = {
        "vocab_size": 816,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    model = random_model(
        "qwen3_moe",
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    described = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        **sizes,
    }
    write_json(folder / "config.json", described)
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    ids = {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0}
    write_json(folder / "generation_config.json", {**ids, **sampling})
    tensors_of(model, torch.bfloat16)
    tensors = expert_tensors(model, dtype=torch.bfloat16)
    assert "model.layers.1.mlp.experts.15.up_proj.weight" in tensors
    save_shards(folder, tensors, 16)
    return Layout(folder, model)


def deepseek_v3(folder: Path) -> Layout:
    """Blocks of 128 x 128 in 8 bits with their scales, and a layer behind the last for drafts. The
    model that comes back has the numbers of the files."""
    names = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
    turns = ["<｜User｜>", "<｜Assistant｜>"]
    template = (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
        "{% endif %}{{ bos_token }}{%- for message in messages %}"
        "{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}"
        "{%- if message['role'] == 'assistant' %}"
        "{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endif %}"
        "{%- endfor %}{% if add_generation_prompt %}{{'<｜Assistant｜>'}}{% endif %}"
    )
    roles = {
        role: {"__type": "AddedToken", **flagged(text, normalized=True)}
        for role, text in zip(("bos_token", "eos_token", "pad_token"), names, strict=True)
    }
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        **roles,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 131072,
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": template,
    }
    byte_level_tokenizer(folder, list(names), turns, config)
    sizes = {
        "vocab_size": 816,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "max_position_embeddings": 163840,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    yarn = {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, **yarn}
    model = random_model("deepseek_v3", spread=0.06, **sizes, rope_parameters=rope)
    described = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {**yarn, "type": "yarn"},
        "rope_theta": 10000,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        **sizes,
    }
    write_json(folder / "config.json", described)
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    ids = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1}
    write_json(folder / "generation_config.json", {**ids, **sampling})
    for layer in (1, 2):
        # As large as in the release: rounded inputs then hardly ever lead to other experts.
        model.model.layers[layer].mlp.gate.e_score_correction_bias.mul_(20)
    tensors = in_blocks_of_8_bits(model)
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name.replace("layers.2", "layers.3")] = tensors[name].clone()
    draft, hidden = "model.layers.3.", sizes["hidden_size"]
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        tensors[draft + name] = torch.randn(sizes["vocab_size"], hidden).bfloat16()
    tensors[f"{draft}eh_proj.weight"] = torch.randn(hidden, 2 * hidden).bfloat16()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{draft}{name}.weight"] = torch.ones(hidden).bfloat16()
    save_shards(folder, tensors, 7)
    return Layout(folder, model)


def in_blocks_of_8_bits(model: Any) -> Tensors:
    """All matrices of the layers but routers, with their scales; the model gets their numbers."""
    pack = scaled("block", name="weight_scale_inv")
    tensors = expert_tensors(model, pack, dtype=torch.bfloat16)
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors["model.layers.1.mlp.experts.7.up_proj.weight_scale_inv"].shape == (1, 2)
    assert tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 2)
    return tensors


def gemma_3_4b_it(folder: Path) -> Layout:
    """The text's part of a model of images, whose other tensors lie in the same files."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    template = (
        "{{ bos_token }}{%- for message in messages -%}"
        "{%- if (message['role'] == 'assistant') -%}{%- set role = \"model\" -%}"
        "{%- else -%}{%- set role = message['role'] -%}{%- endif -%}"
        "{{ '<start_of_turn>' + role + '\\n' }}"
        "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
        "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
        "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
        "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"
    )
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<pad>",
        "processor_class": "Gemma3Processor",
        "sp_model_kwargs": None,
        "spaces_between_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
    }
    byte_level_tokenizer(folder, special, turns, config)
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "sliding_window": 16,
        "vocab_size": 816,
    }
    usual = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    }
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    model = random_model("gemma3", **text, **usual, **ids)
    scaling = {"factor": 8.0, "rope_type": "linear"}
    described = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 5],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {**text, "model_type": "gemma3_text", "rope_scaling": scaling},
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }
    write_json(folder / "config.json", described)
    sampling = {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"}
    generation = {"bos_token_id": 2, "eos_token_id": [1, 5], "pad_token_id": 0, **sampling}
    write_json(folder / "generation_config.json", generation)
    write_json(
        folder / "preprocessor_config.json", {"image_processor_type": "Gemma3ImageProcessor"}
    )
    write_json(folder / "processor_config.json", {"processor_class": "Gemma3Processor"})
    tensors = {
        f"language_model.{name}": tensor
        for name, tensor in tensors_of(model, torch.bfloat16).items()
        if name != "lm_head.weight"
    }
    images = "vision_tower.vision_model."
    tensors[f"{images}embeddings.patch_embedding.weight"] = torch.ones(8, 3, 2, 2).bfloat16()
    tensors[f"{images}encoder.layers.0.self_attn.q_proj.weight"] = torch.ones(8, 8).bfloat16()
    tensors["multi_modal_projector.mm_input_projection_weight"] = torch.ones(8, 64).bfloat16()
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(8).bfloat16()
    save_shards(folder, tensors, 2)
    return Layout(folder, model)


def phi_4_mini_instruct(folder: Path) -> Layout:
    special = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>"]
    template = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] "
        "+ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    )
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": "<|endoftext|>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "<|endoftext|>",
    }
    byte_level_tokenizer(folder, special, [], config)
    sizes = {
        "vocab_size": 816,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    factors = {
        "long_factor": [1.0, 1.118, 1.25, 1.4, 1.6, 1.8, 2.2, 3.0, 5.0, 9.0, 17.0, 32.0],
        "short_factor": [1.0] * 12,
    }
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096,
        **factors,
    }
    model = random_model("phi3", **sizes, rope_parameters=rope)
    described = {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rope_scaling": {**factors, "type": "longrope"},
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0",
        "use_cache": True,
        **sizes,
    }
    write_json(folder / "config.json", described)
    ids = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0}
    write_json(folder / "generation_config.json", ids)
    tensors = tensors_of(model, torch.bfloat16)
    del tensors["lm_head.weight"]
    assert "model.layers.0.self_attn.qkv_proj.weight" in tensors
    save_shards(folder, tensors, 2)
    return Layout(folder, model)


def gpt_oss_20b(folder: Path) -> Layout:
    """Experts in MXFP4, shards that are counted from 0, the chat template in a file of its own. The
    model that comes back has the numbers of the files."""
    special = ["<|startoftext|>", "<|endoftext|>", *HARMONY.markers]
    config = {
        "bos_token": "<|startoftext|>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|return|>",
        "extra_special_tokens": {},
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    byte_level_tokenizer(folder, special, [], config)
    (folder / "chat_template.jinja").write_text(templates.HARMONY)
    ids = {text: number for number, text in enumerate(special)}
    ends = [ids[text] for text in ("<|return|>", "<|endoftext|>", "<|call|>")]
    sizes = {
        "vocab_size": 816,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "eos_token_id": ids["<|return|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    described = {**RELEASED_GPT_OSS, **sizes, "experts_per_token": 4}
    write_json(folder / "config.json", described)
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": ids["<|startoftext|>"],
            "do_sample": True,
            "eos_token_id": ends,
            "pad_token_id": ids["<|endoftext|>"],
            "transformers_version": "4.55.0.dev0",
        },
    )
    model = random_model("gpt_oss", **sizes)
    save_shards(folder, released_tensors(model), 3, first=0)
    assert (folder / "model-00000-of-00002.safetensors").exists()
    return Layout(folder, dequantized_model(folder))


LAYOUTS: dict[str, tuple[Callable[[Path], Layout], float]] = {
    "mixtral-8x7b-instruct": (mixtral_8x7b_instruct, 1e-3),
    "qwen3-30b-a3b": (qwen3_30b_a3b, 1e-3),
    # Inputs of its layers are rounded to 8 bits too.
    "deepseek-v3": (deepseek_v3, 0.2),
    "gpt-oss-20b": (gpt_oss_20b, 1e-2),
    "gemma-3-4b-it": (gemma_3_4b_it, 1e-3),
    "phi-4-mini-instruct": (phi_4_mini_instruct, 1e-3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_released_folder_chats(name: str, tmp_path: Path) -> None:
    """The prompt of a chat is that of transformers, and each token the likeliest by its model, ties
    aside: of logits that lie as close as rounding can move them."""
    make, tie = LAYOUTS[name]
    layout = make(tmp_path)
    theirs = AutoTokenizer.from_pretrained(layout.folder)
    prompt = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    wanted = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with tiny_llm(layout.folder, max_model_len=256) as llm:
        (output,) = llm.chat(CHAT, wanted, use_tqdm=False)  # type: ignore[arg-type]
        assert_at_rest(llm)
    assert output.prompt_token_ids == prompt
    made = output.outputs[0].token_ids
    assert len(made) == 16 and len(set(made)) > 4
    assert is_greedy(layout.model, prompt, made, tie)


@pytest.mark.parametrize("is_whole", [None, False, True], ids=["one rank", "parts", "whole"])
def test_blocks_of_8_bits_of_experts_and_latents(is_whole: bool | None, tmp_path: Path) -> None:
    """DeepSeek-V3's release against the numbers that it stands for, on one rank and on two that
    have a part of each expert or some of them; but for inputs that are rounded to 8 bits."""
    layout = deepseek_v3(tmp_path)
    tokens = random_tokens(40, vocab=800)
    expected = reference_logits(layout.model, tokens)
    config = load_model_config(str(tmp_path))

    def check(parallel: Parallel) -> None:
        model = load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)
        run = PagedRun(model, config, [tokens], num_ranks=parallel.size)
        run.step({0: 39})
        run.step({0: 1})
        error = (run.all_logits()[0] - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < 0.06

    if is_whole is None:
        check(Parallel())
    else:
        on_ranks(2, lambda one: check(replace(one, expert_parallel=is_whole)))
