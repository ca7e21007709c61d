"""What a forward pass is given: embeddings in place of token ids, attention by KV group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.model import ModelConfig, load_model_config
from quire.layers.attention.backend import AttentionBackend
from quire.layers.attention.cpu import CpuBackend
from quire.layers.attention.layer import Attention, StepContext, bind_kv_groups
from quire.layers.attention.torch import TorchBackend
from quire.layers.embedding import VocabEmbedding
from quire.models.loader import load_model
from quire.models.registry import CausalLM
from quire.protocol.kv_spec import PAD_LAYER, KVGroup
from tests.models.reference import PagedRun, random_model, random_tokens, save_safetensors

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
    "opt": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
}
TOKENS = random_tokens(23)
BACKENDS: list[type[AttentionBackend]] = [TorchBackend]
if CpuBackend.missing() is None:
    BACKENDS.append(CpuBackend)


def loaded(folder: Path, family: str) -> tuple[CausalLM, ModelConfig]:
    save_safetensors(random_model(family, **FAMILIES[family]), folder)
    config = load_model_config(str(folder))
    return load_model(config, dtype=torch.float32, device="cpu"), config


def run(model: CausalLM, config: ModelConfig, backend: type[AttentionBackend]) -> torch.Tensor:
    paged = PagedRun(model, config, [TOKENS], backend)
    for count in (15, 1, 7):
        paged.step({0: count})
    return paged.all_logits()[0]


class Embedded(torch.nn.Module):
    """A model that is given embeddings of the tokens, not their ids."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model
        (self.table,) = (m for m in model.modules() if isinstance(m, VocabEmbedding))
        self.logits, self.lm_head = model.logits, model.lm_head

    def forward(self, step: StepContext) -> torch.Tensor:
        assert step.token_ids is not None
        embeddings = self.table(step.token_ids)
        return self.model(StepContext(step.positions, step.attention, embeddings=embeddings))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_take_the_place_of_token_ids(
    family: str, backend: type[AttentionBackend], tmp_path: Path
) -> None:
    model, config = loaded(tmp_path, family)
    embedded: Any = Embedded(model)
    assert torch.equal(run(embedded, config, backend), run(model, config, backend))


class Grouped(torch.nn.Module):
    """A model whose attention comes in several KV groups, each with a cache of its own."""

    def __init__(self, model: CausalLM, others: list[PagedRun]) -> None:
        super().__init__()
        self.model, self.others = model, others
        self.logits, self.lm_head = model.logits, model.lm_head

    def forward(self, step: StepContext) -> torch.Tensor:
        (first,) = step.attention
        inputs = first.inputs  # type: ignore[attr-defined]
        groups = (first, *(other.backend.plan(inputs) for other in self.others))
        return self.model(StepContext(step.positions, groups, step.token_ids))


GROUPS = [
    (KVGroup(None, (0, 2)), KVGroup(None, (1, PAD_LAYER))),
    (KVGroup(None, (1, 2)), KVGroup(None, (0, PAD_LAYER))),
    (KVGroup(None, (PAD_LAYER, PAD_LAYER, 2)), KVGroup(None, (PAD_LAYER, 0, 1))),
    (KVGroup(None, (2,)), KVGroup(None, (0,)), KVGroup(None, (1,))),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_find_their_group(
    family: str, backend: type[AttentionBackend], tmp_path: Path
) -> None:
    """Layers in slots of several groups: wrong ones would read NaN or foreign keys. The native
    library carries out each run of layers in one group."""
    model, config = loaded(tmp_path, family)
    expected = run(model, config, backend)
    assert config.num_layers == 3
    for groups in GROUPS:
        model = load_model(config, dtype=torch.float32, device="cpu")
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        assert [(a.kv_group, a.layer_slot) for a in layers] == [(0, 0), (0, 1), (0, 2)]
        window = config.sliding_window  # of all layers, if at all
        bind_kv_groups(model, [replace(group, window=window) for group in groups])
        others = [PagedRun(model, config, [TOKENS], backend) for _ in groups[1:]]
        grouped: Any = Grouped(model, others)
        assert torch.equal(run(grouped, config, backend), expected)
