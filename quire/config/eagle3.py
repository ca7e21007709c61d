"""EAGLE-3 heads: their checkpoints' configurations as one of a model with a single layer. No torch.

Two layouts are published: a Llama configuration with `draft_vocab_size` (SafeAILab, AngelSlim,
SpecForge, ModelOpt), and that of the library speculators, which has the layer's in
`transformer_layer_config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.files.json_file import CheckedValues

EAGLE3 = "Eagle3LlamaForCausalLM"
NAMES = (EAGLE3, "LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel")
"""What `architectures` may say of such a head."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
USUAL = {
    "num_hidden_layers": 1,
    "use_sliding_window": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
"""Settings that change what a head computes, and the values that there is code for."""


@dataclass(frozen=True)
class Eagle3Config:
    """What a head has beside the configuration of its layer."""

    draft_vocab_size: int
    """Tokens that it can draft."""
    target_hidden_size: int
    layer_ids: tuple[int, ...] | None
    """Layers of the target whose inputs it reads; None: three, by the number of layers."""
    norm_before_residual: bool
    """Whether the layer's residual stream begins with the normalised hidden state."""
    num_tokens: int | None
    """Drafts that it was trained for, where the checkpoint says."""

    @classmethod
    def of(cls, values: CheckedValues) -> Eagle3Config:
        """That of a configuration which `translate_eagle3` gave."""
        hidden_size = values.count("hidden_size")
        ids = values.values.get(LAYER_IDS)
        return cls(
            values.count("draft_vocab_size", values.count("vocab_size")),
            values.count("target_hidden_size", hidden_size),
            tuple(ids) if ids else None,
            values.boolean("norm_before_residual", False),
            values.integer("speculative_tokens", None),
        )

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Layers of a target with so many of them whose inputs the head reads, in this order."""
        if self.layer_ids is not None:
            return self.layer_ids
        return (2, num_layers // 2, num_layers - 3)


def is_eagle3(raw: dict[str, Any]) -> bool:
    """Whether config.json is that of an EAGLE-3 head."""
    names = raw.get("architectures")
    is_named = isinstance(names, list) and any(name in NAMES for name in names)
    return is_named or raw.get("speculators_model_type") == "eagle3"


def translate_eagle3(file: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a head as one of a Llama with one layer; refuses what its model has no
    code for. Others stay as they are."""
    if not is_eagle3(raw):
        return raw
    values = CheckedValues(file, raw)
    layer = values.mapping("transformer_layer_config")
    found = {**raw, **_inner(values)}
    if layer is not None:
        own = {key: value for key, value in raw.items() if key != "transformer_layer_config"}
        found = {"norm_before_residual": True, **layer, **own}
        found["model_type"] = layer.get("model_type")
        found["speculative_tokens"] = _trained_tokens(values)
    found = {**found, "architectures": [EAGLE3], "tie_word_embeddings": False}
    found = {key: value for key, value in found.items() if value is not None}
    _check(CheckedValues(file, found))
    return found


def _inner(values: CheckedValues) -> dict[str, Any]:
    """What ModelOpt and SpecForge say in an object of its own. There layers are those whose outputs
    are read, and not, as speculators has it, those whose inputs are."""
    inner = dict(values.mapping("eagle_config") or {})
    ids = inner.get(LAYER_IDS)
    if isinstance(ids, list) and all(type(one) is int for one in ids):
        inner[LAYER_IDS] = [one + 1 for one in ids]
    return inner


def _trained_tokens(values: CheckedValues) -> int | None:
    methods = (values.mapping("speculators_config") or {}).get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    count = methods[0].get("speculative_tokens")
    return count if type(count) is int and count > 0 else None


def _check(values: CheckedValues) -> None:
    raw = values.values
    kind = values.text("model_type", "llama")
    if kind != "llama":
        values.fail("model_type", "llama, which is what the layer of an EAGLE-3 head is", kind)
    for key, usual in USUAL.items():
        if raw.get(key, usual) != usual:
            values.fail(key, f"{str(usual).lower()} in an EAGLE-3 head", raw[key])
    ids = raw.get(LAYER_IDS)
    if ids and not (isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)):
        values.fail(LAYER_IDS, "a list of layers", ids)
