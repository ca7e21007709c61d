"""The page docs/models.md, written from the registry and from small models of each family.

`python -m quire.models.document > docs/models.md` brings it up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from quire.config.gguf_model import GGUF_ARCHITECTURES
from quire.config.model import (
    MTP_ARCHITECTURES,
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    load_model_config,
)
from quire.config.quantization import METHODS
from quire.layers.attention.layer import Attention
from quire.layers.decoder import DecoderLayers, NumberedLayers
from quire.layers.experts import Experts
from quire.layers.linear import LatentLinear
from quire.layers.parallel import Parallel, Stage
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.rotary import Rotary
from quire.layers.weights import Build
from quire.models.fusion import layer_parts
from quire.models.registry import CausalLM, model_class

HEAD = """\
# Models

<!-- Written by `python -m quire.models.document > docs/models.md`; change the registry. -->

Other architectures are refused by name before anything is loaded. Weights come from safetensors or
`.bin` files, and of the families with a GGUF name from such files too. Quantised checkpoints may be
{methods}: see
[quantization](quantization.md).

- *attention*: what differs from a layer that sees all tokens and rotates whole heads, in a model
  with the settings that the family takes for granted.
- *experts*: *stacked* are those of a layer that checkpoints have in one tensor.
- *quantised*: whether all matrices may be, in any of these formats.
- *adapters*: which linear layers may have [adapters](adapters.md).
- *drafts*: what [speculation](speculation.md) may take them from: the text, another model with the
  same vocabulary, an EAGLE-3 head, the model's own MTP layer. Where config.json gives all layers
  a window, the text alone.
- *parallelism*: what divides the weights ([distributed](distributed.md)).
- *fused*: whether norms are computed in the call of the layer that follows, on a CPU all layers in
  one call. `quire quantize --calibrate` has factors for these families.

"""

COLUMNS = (
    *("family", "architectures", "attention", "experts", "GGUF"),
    *("quantised", "adapters", "drafts", "parallelism", "fused"),
)
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "n_embd": 64,
    "n_layer": 12,
    "n_head": 4,
    "ffn_dim": 128,
    "max_position_embeddings": 64,
}


def models_page() -> str:
    """The whole page."""
    families = dict.fromkeys(SUPPORTED_ARCHITECTURES.values())
    rows = [_row(family) for family in sorted(families)]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return HEAD.format(methods=", ".join(METHODS)) + table


def _row(family: str) -> tuple[str, ...]:
    names = [name for name, module in SUPPORTED_ARCHITECTURES.items() if module == family]
    title = (import_module(f"quire.models.{family}").__doc__ or "").partition(":")[0]
    stored = [gguf for gguf, models in GGUF_ARCHITECTURES.items() if {*models} & {*names}]
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"architectures": names[:1], **TINY}))
        config = load_model_config(folder, load_format="dummy")
    model = _made(config)
    layers = [layer for part in model.modules() for layer in _layers(part)]
    return (
        " ".join(title.split()),
        ", ".join(f"`{name}`" for name in names),
        "; ".join(_traits(model, config.head_dim)) or "-",
        _experts(config, model),
        ", ".join(f"`{gguf}`" for gguf in stored) or "-",
        "all but experts, which may be MXFP4" if model.weight_map.stacks_experts else "all",
        "all but `kv_b_proj`" if _is_latent(model) else "all",
        _drafts(config, model),
        ", ".join(_parallelism(config, model)),
        "yes" if all(layer_parts(layer) is not None for layer in layers) else "no",
    )


def _experts(config: ModelConfig, model: CausalLM) -> str:
    if config.experts is None:
        return "-"
    return "stacked" if model.weight_map.stacks_experts else "yes"


def _is_latent(model: CausalLM) -> bool:
    return any(isinstance(module, LatentLinear) for module in model.modules())


def _drafts(config: ModelConfig, model: CausalLM) -> str:
    kinds = ["model"]
    if any(isinstance(module, DecoderLayers) for module in model.modules()):
        kinds.append("EAGLE-3")
    if config.architecture in MTP_ARCHITECTURES:
        kinds.append("MTP")
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if all(layer.window is not None for layer in layers):
        # Blocks are let go of, and with them what another model would keep there.
        return f"text; without windows also {', '.join(kinds)}"
    return ", ".join(["text", *kinds])


def _made(config: ModelConfig, parallel: Parallel | None = None) -> CausalLM:
    """A model without memory."""
    build = Build(
        torch.bfloat16, torch.device("meta"), parallel or Parallel(), lambda path: Unquantized()
    )
    return model_class(config.architecture)(config, build)


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if isinstance(module, NumberedLayers):
        yield from module


def _traits(model: CausalLM, head_dim: int) -> Iterator[str]:
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    rotaries = [module for module in model.modules() if isinstance(module, Rotary)]
    windows = [layer.window for layer in layers if layer.window is not None]
    is_latent = _is_latent(model)
    if is_latent:
        yield "latent (MLA)"
    if windows:
        yield f"windows in {len(windows)} of {len(layers)} layers"
    if any(layer.softcap is not None for layer in layers):
        yield "capped scores"
    if any(name.endswith(".sinks") for name, _ in model.named_modules()):
        yield "sinks"
    if any(name.endswith("q_norm") for name, _ in model.named_modules()):
        yield "norms of queries and keys"
    rotates = [getattr(module, "rotates", True) for module in model.modules()]
    if not rotaries:
        yield "learned positions"
    elif not all(rotates):
        yield f"no RoPE in {rotates.count(False)} of {len(layers)} layers"
    if len(rotaries) > 1:
        yield "two bases of RoPE"
    shares = {2 * rotary.cos.shape[1] / head_dim for rotary in rotaries}
    if max(shares, default=1.0) < 1 and not is_latent:
        yield f"{max(shares):.0%} of a head rotates"
    if any(rotary.interleaved for rotary in rotaries):
        yield "neighbours rotate"


def _parallelism(config: ModelConfig, model: CausalLM) -> Iterator[str]:
    ranks = {"tensor": Parallel(0, 2), "pipeline": replace(Parallel(), stage=Stage(0, 2))}
    whole = _num_weights(model)
    for kind, rank in ranks.items():
        if _num_weights(_made(config, rank)) < 0.75 * whole:
            yield kind
    if config.experts is not None:
        divided = _made(config, Parallel(0, 2, expert_parallel=True))
        experts = [module for module in divided.modules() if isinstance(module, Experts)]
        if all(len(one.kept) < config.experts.count for one in experts):
            yield "expert"


def _num_weights(model: CausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    sys.stdout.write(models_page())
