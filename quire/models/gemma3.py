"""Gemma 3 (text): Gemma 2 with queries and keys normalised per head, and another base of RoPE in
layers with a window. Images are not taken."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.config.model import ModelConfig
from quire.layers.attention.layer import Rotation, StepContext
from quire.layers.rotary import Rotary
from quire.layers.weights import Build
from quire.models.gemma2 import Gemma2ForCausalLM, Gemma2Model, GemmaLayer
from quire.models.llama import AttentionTraits


class Gemma3Layer(GemmaLayer):
    def __init__(
        self, config: ModelConfig, layer_index: int, traits: AttentionTraits, build: Build
    ) -> None:
        super().__init__(config, layer_index, traits, build)
        self.is_local = config.slides(layer_index)

    def forward(self, x: torch.Tensor, rotation: Rotation, step: StepContext) -> torch.Tensor:
        local = rotation.local if self.is_local else None
        return super().forward(x, rotation if local is None else local, step)


class Gemma3Model(Gemma2Model):
    layer_class = Gemma3Layer

    def __init__(self, config: ModelConfig, traits: list[AttentionTraits], build: Build) -> None:
        super().__init__(config, traits, build)
        theta = config.number("rope_local_base_freq", 10000.0)
        self.local_rotary = Rotary(
            config.rotary_dim, config.max_position_tokens, theta, None, build.device
        )

    def forward(self, step: StepContext) -> torch.Tensor:
        local = self.local_rotary(step.positions)
        both = replace(self.rotary(step.positions), local=local)
        return self.layers(self.embed(step), both, step, self.norm)


def _rename(name: str) -> str:
    """The language model beside one of images is called `language_model.model` in released files
    and `model.language_model` in later ones."""
    name = name.removeprefix("language_model.")
    return name.replace("model.language_model.", "model.", 1)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    model_class = Gemma3Model
    weight_map = replace(
        Gemma2ForCausalLM.weight_map,
        rename=_rename,
        ignored_parts=("vision_tower.", "multi_modal_projector."),
    )

    @staticmethod
    def attention_traits(config: ModelConfig, layer_index: int) -> AttentionTraits:
        traits = Gemma2ForCausalLM.attention_traits(config, layer_index)
        if traits.softcap is not None:
            config.values.fail(
                "attn_logit_softcapping", "null, since Gemma 3 does not cap scores", traits.softcap
            )
        return replace(traits, qk_norm=True)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """As released with a model of images, whose weights are left out."""
