"""Heads that draft, as their checkpoints are published, and what they draft by straightforward
code: whole sequences in one pass, without any cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.models.reference import VOCAB
from tests.text.tokenizer_samples import write_json
from tests.tiny import save_tiny

Layer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Hidden states and token ids of all positions to hidden states for further drafts, and logits."""


def drafts(layer: Layer, hidden: Tensor, ids: Tensor, count: int) -> tuple[list[int], float]:
    """What is most likely to follow `ids`, token by token, and the least distance of one of these
    from the next most likely; `hidden` are the states before each."""
    found, least = [], float("inf")
    for _ in range(count):
        out, logits = layer(hidden, ids)
        best = logits[-1].topk(2)
        found.append(int(best.indices[0]))
        least = min(least, float(best.values[0] - best.values[1]))
        hidden = torch.cat((hidden, out[-1:]))
        ids = torch.cat((ids, torch.tensor(found[-1:])))
    return found, least


@torch.no_grad()
def target_states(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """What enters each layer of transformers' model, and what its final norm gives."""
    ids = torch.tensor([list(tokens)])
    out = model(ids, use_cache=False, output_hidden_states=True)
    return tuple(one[0] for one in out.hidden_states)


# --- MTP ------------------------------------------------------------------------------------------


def save_mtp(folder: Path, family: str, **changes: Any) -> tuple[PreTrainedModel, MtpModel]:
    """A target and the layer behind its last one, in one checkpoint with the names of the hub."""
    model = save_tiny(folder, family, num_nextn_predict_layers=1, **changes)
    mtp = random_mtp(model)
    add_mtp(folder, model, mtp)
    return model, mtp


def random_mtp(model: PreTrainedModel, seed: int = 3, spread: float = 0.15) -> MtpModel:
    mtp = MtpModel(model, 1).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in mtp.layers.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        with torch.no_grad():
            parameter.normal_(1.0 if is_norm else 0.0, spread, generator=generator)
    for name, buffer in mtp.layers.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, spread, generator=generator)
    return mtp


def mtp_tensors(model: PreTrainedModel, mtp: MtpModel) -> dict[str, Tensor]:
    """As checkpoints have them: experts one by one, the target's embedding and head repeated."""
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    tensors = {
        f"{prefix}embed_tokens.weight": model.get_input_embeddings().weight,
        f"{prefix}shared_head.head.weight": model.lm_head.weight,
    }
    for name, tensor in mtp.layers[0].state_dict().items():
        name = prefix + name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            for expert, matrix in enumerate(tensor):
                stem, _, own = name.rpartition(".")
                parts = {own: matrix}
                if own == "gate_up_proj":
                    parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                for key, part in parts.items():
                    tensors[f"{stem}.{expert}.{key}.weight"] = part
        else:
            tensors[name] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def add_mtp(folder: Path, model: PreTrainedModel, mtp: MtpModel) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **mtp_tensors(model, mtp)}, file, {"format": "pt"})


@torch.no_grad()
def mtp_layer(mtp: MtpModel) -> Layer:
    """transformers' own."""

    @torch.no_grad()
    def layer(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(1, len(ids) + 1)[None]
        out = mtp.forward_layer(0, hidden[None], positions, None, input_ids=ids[None])
        return out[0], mtp._project_to_logits(out)[0]

    return layer


# --- EAGLE-3 --------------------------------------------------------------------------------------

HEAD = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "model_type": "llama",
}
DRAFT_VOCAB = 90


@dataclass(frozen=True)
class Eagle3:
    """A head with random weights, under SafeAILab's names."""

    shape: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor
    """Its own, or the target's."""
    norm_before_residual: bool = False
    layer_ids: tuple[int, ...] | None = None

    @torch.no_grad()
    def layer(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        shape, w = self.shape, self.tensors
        heads, groups, dim = (
            shape[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        normal = self._norm(hidden, "midlayer.hidden_norm")
        x = torch.cat((self._norm(self.embedding[ids], "midlayer.input_layernorm"), normal), dim=-1)
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{one}_proj.weight"].T).view(len(x), -1, dim)
            for one in "qkv"
        )
        q, k = self._rotate(q), self._rotate(k)
        k, v = (one.repeat_interleave(heads // groups, dim=1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        stream = normal if self.norm_before_residual else hidden
        stream = stream + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        x = self._norm(stream, "midlayer.post_attention_layernorm")
        gate, up = (x @ w[f"midlayer.mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        stream = stream + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        few = self._norm(stream, "norm") @ w["lm_head.weight"].T
        if "d2t" not in w:
            return stream, few
        logits = torch.full((len(few), shape["vocab_size"]), float("-inf"))
        logits[:, torch.arange(len(w["d2t"])) + w["d2t"]] = few
        return stream, logits

    def combine(self, states: Sequence[Tensor], num_layers: int) -> Tensor:
        ids = self.layer_ids or (2, num_layers // 2, num_layers - 3)
        return torch.cat([states[one] for one in ids], dim=-1) @ self.tensors["fc.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.shape["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        steps = torch.arange(half, dtype=torch.float32) / half
        angles = torch.arange(len(x))[:, None] * self.shape["rope_theta"] ** -steps
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def random_eagle3(
    target: PreTrainedModel,
    *,
    draft_vocab: int = DRAFT_VOCAB,
    own_embedding: bool = False,
    norm_before_residual: bool = False,
    layer_ids: tuple[int, ...] | None = None,
    seed: int = 7,
    spread: float = 0.15,
) -> Eagle3:
    """A head has the width of the target's embedding, unless it has one of its own."""
    generator = torch.Generator().manual_seed(seed)
    wide = target.config.hidden_size
    shape = dict(HEAD) if own_embedding else {**HEAD, "hidden_size": wide, "head_dim": wide // 4}
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, groups = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    matrices = {
        "fc": (hidden, len(layer_ids or (0, 0, 0)) * wide),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (groups, 2 * hidden),
        "midlayer.self_attn.v_proj": (groups, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (draft_vocab, hidden),
    }
    if own_embedding:
        matrices["embed_tokens"] = (VOCAB, hidden)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {
        f"{name}.weight": torch.randn(size, generator=generator) * spread
        for name, size in matrices.items()
    }
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        tensors[f"{name}.weight"] = 1 + spread * torch.randn(hidden, generator=generator)
    if draft_vocab < VOCAB:
        chosen = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None:
        embedding = target.get_input_embeddings().weight.detach()
    return Eagle3(shape, tensors, embedding, norm_before_residual, layer_ids)


def save_eagle3(folder: Path, head: Eagle3, target: PreTrainedModel, pickled: bool = False) -> Path:
    """In SafeAILab's layout; their own are `pickled`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **head.shape,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(head.tensors["lm_head.weight"]),
        "target_hidden_size": target.config.hidden_size,
        "torch_dtype": "float32",
    }
    if head.norm_before_residual:
        config["norm_before_residual"] = True
    if head.layer_ids is not None:
        outputs = [layer - 1 for layer in head.layer_ids]
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": outputs,
            "use_aux_hidden_state": True,
            "use_mtp_layernorm": False,
        }
    write_json(folder / "config.json", config)
    if pickled:
        torch.save(_stored(head), folder / "pytorch_model.bin")
    else:
        save_file(_stored(head), folder / "model.safetensors", {"format": "pt"})
    return folder


def save_speculators(folder: Path, head: Eagle3, target: PreTrainedModel) -> Path:
    """In the layout of the library speculators."""
    folder.mkdir(parents=True, exist_ok=True)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(head.tensors["lm_head.weight"]),
        "norm_before_residual": head.norm_before_residual,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": head.shape,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposal]},
        "dtype": "float32",
    }
    if head.layer_ids is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(head.layer_ids)
    if head.shape["hidden_size"] != target.config.hidden_size:
        config["target_hidden_size"] = target.config.hidden_size
    write_json(folder / "config.json", config)
    tensors = {name.replace("midlayer", "layers.0"): one for name, one in _stored(head).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _stored(head: Eagle3) -> dict[str, Tensor]:
    tensors = dict(head.tensors)
    if "d2t" in tensors:
        known = torch.zeros(VOCAB, dtype=torch.bool)
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        known[ids[ids < VOCAB]] = True
        tensors["t2d"] = known
    return {name: one.contiguous() for name, one in tensors.items()}


# --- heads that agree -----------------------------------------------------------------------------


def forget(folder: Path, **others: Tensor) -> None:
    """Rewrites a target so that each token depends on the one before it alone; `others` replace
    tensors too."""
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **others}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, file, {"format": "pt"})


def save_agreeing_mtp(folder: Path, family: str, **changes: Any) -> None:
    """A target and a head which both know what follows a token."""
    model, _ = save_mtp(folder, family, **changes)
    prefix, wide = f"model.layers.{model.config.num_hidden_layers}.", model.config.hidden_size
    changed = {
        f"{prefix}eh_proj.weight": torch.cat((torch.eye(wide), torch.zeros(wide, wide)), dim=1),
        f"{prefix}enorm.weight": torch.ones(wide),
        f"{prefix}shared_head.norm.weight": model.model.norm.weight.detach().clone(),
    }
    forget(folder, **changed)


def save_agreeing_eagle3(folder: Path, target: PreTrainedModel) -> None:
    """A head for a target that forgets: its layer attends to the token itself, as far as others do
    not resemble it, and passes on its embedding."""
    head = random_eagle3(target, draft_vocab=140)
    wide = target.config.hidden_size
    head.shape["num_key_value_heads"] = head.shape["num_attention_heads"]
    embedded = torch.cat((torch.eye(wide), torch.zeros(wide, wide)), dim=1)
    known = head.tensors["d2t"] + torch.arange(140)
    head.tensors.update(
        {
            "fc.weight": torch.zeros(wide, 3 * wide),
            "midlayer.input_layernorm.weight": torch.ones(wide),
            "midlayer.self_attn.q_proj.weight": 3 * embedded,
            "midlayer.self_attn.k_proj.weight": 3 * embedded,
            "midlayer.self_attn.v_proj.weight": embedded,
            "midlayer.self_attn.o_proj.weight": torch.eye(wide),
            "midlayer.mlp.down_proj.weight": torch.zeros(wide, head.shape["intermediate_size"]),
            "norm.weight": target.model.norm.weight.detach(),
            "lm_head.weight": target.lm_head.weight.detach()[known],
        }
    )
    save_speculators(folder, head, target)
