"""Calibration: what the inputs of each layer look like over some texts, and how its weights are
scaled before they are rounded so that this costs least.

A linear layer gives the same if each input is divided by a factor and its weights are multiplied by
it. Inputs with large values get factors above 1, so that their weights are rounded more finely; the
division goes into what makes the inputs: the norm before, or the rows of the layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.model import ModelConfig
from quire.kernels.torch.attention import attend
from quire.layers.attention.layer import QKV, AttentionStep, LatentQKV, StepContext
from quire.layers.decoder import LayerParts
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.parallel import Parallel, Stage
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import ShardKey, WeightedLayer
from quire.models.fusion import layer_parts
from quire.models.loader import load_model, weight_targets
from quire.models.registry import CausalLM
from quire.quantize.methods import Method

EXPONENTS = tuple(step / 20 for step in range(1, 21))
"""Factors that are tried are mean magnitudes of inputs to these powers."""
SAMPLED_TOKENS = 256
"""Inputs on which the outputs of rounded weights are compared with exact ones."""
SMALLEST_MEAN = 1e-4


@dataclass(frozen=True)
class Adjustment:
    """What is done to a tensor before it is rounded."""

    times_inputs: Tensor | None = None
    over_outputs: Tensor | None = None
    importance: Tensor | None = None
    """Of each input: the mean of its squares, as the layer will see it."""

    def apply(self, weight: Tensor) -> Tensor:
        """In float32 if it changes. A vector has outputs alone."""
        if self.times_inputs is not None:
            weight = weight * self.times_inputs.to(weight.device)
        if self.over_outputs is not None:
            divisor = self.over_outputs.to(weight.device)
            weight = weight / (divisor if weight.dim() == 1 else divisor[:, None])
        return weight


Adjustments = dict[str, Adjustment]
"""By the names of tensors as the model has them."""


class InputStatistics:
    """Collects the inputs of a layer."""

    def __init__(self, num_tokens: int) -> None:
        # Odd: first tokens of windows are unlike others, and must not be met each time.
        self._every = num_tokens // SAMPLED_TOKENS | 1
        self._seen = 0
        self._magnitudes: Tensor | None = None
        self._squares: Tensor | None = None
        self._sampled: list[Tensor] = []

    def add(self, inputs: Tensor) -> None:
        magnitudes, squares = inputs.abs().sum(0), inputs.square().sum(0)
        if self._magnitudes is None or self._squares is None:
            self._magnitudes, self._squares = magnitudes, squares
        else:
            self._magnitudes += magnitudes
            self._squares += squares
        self._sampled.append(inputs[-self._seen % self._every :: self._every].clone())
        self._seen += len(inputs)

    @property
    def magnitudes(self) -> Tensor:
        assert self._magnitudes is not None
        return self._magnitudes / self._seen

    @property
    def squares(self) -> Tensor:
        assert self._squares is not None
        return self._squares / self._seen

    @property
    def sampled(self) -> Tensor:
        return torch.cat(self._sampled)


class WholePrompt(AttentionStep):
    """Attention within one prompt, all of whose tokens are there."""

    def attend(
        self,
        layer_index: int,
        qkv: QKV | LatentQKV,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(qkv, LatentQKV):
            mixed = self.attend(layer_index, qkv.absorbed(), scale, window, softcap)
            return qkv.expansion.from_latent(mixed)
        q, k, v = (x.transpose(0, 1) for x in qkv.prepared())
        if softcap is not None or sinks is not None:
            return attend(q.transpose(0, 1), k, v, scale, window, softcap, sinks)
        places = torch.arange(q.shape[1], device=q.device)
        distance = places[:, None] - places
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], seen, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


@torch.inference_mode()
def calibrate(
    config: ModelConfig,
    windows: Sequence[Sequence[int]],
    method: Method,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
) -> Adjustments:
    """Runs the model in float32, of which one layer is in memory at a time, and chooses factors
    layer by layer. `dtype` is that of the norms that are written."""
    adjustments: Adjustments = {}
    hidden: list[Tensor | None] = [None] * len(windows)
    num_tokens = sum(map(len, windows))
    for index in range(config.num_layers):
        progress(f"calibrating layer {index + 1} of {config.num_layers}")
        model = load_model(
            config,
            dtype=torch.float32,
            device=device,
            parallel=Parallel(stage=Stage(index, config.num_layers)),
            method_for=lambda path: Unquantized(),
            fused=False,
        )
        statistics = {
            layer: InputStatistics(num_tokens)
            for layer in model.modules()
            if isinstance(layer, Linear)
        }
        for layer, collected in statistics.items():
            layer.register_forward_pre_hook(lambda _, given, to=collected: to.add(given[0]))
        for number, window in enumerate(windows):
            step = StepContext(
                torch.arange(len(window), device=device),
                (WholePrompt(),),
                torch.tensor(window, device=device),
                hidden=hidden[number],
            )
            hidden[number] = model(step)
        adjustments |= _adjust(model, statistics, method, dtype)
    return adjustments


def _adjust(
    model: CausalLM, statistics: dict[Linear, InputStatistics], method: Method, dtype: torch.dtype
) -> Adjustments:
    chosen = _Chosen(model, statistics, method, dtype)
    for layer in model.modules():
        parts = layer_parts(layer)
        if parts is not None:
            chosen.scale(parts)
    return chosen.adjustments


class _Chosen:
    """The factors of the layers of one stage."""

    def __init__(
        self,
        model: CausalLM,
        statistics: dict[Linear, InputStatistics],
        method: Method,
        dtype: torch.dtype,
    ) -> None:
        self._statistics, self._method, self._dtype = statistics, method, dtype
        self._names: dict[WeightedLayer, dict[tuple[str, ShardKey], str]] = {}
        for name, target in weight_targets(model).items():
            names = self._names.setdefault(target.layer, {})
            names[target.parameter, target.shard_key] = name
        self.adjustments: Adjustments = {
            name: Adjustment(importance=collected.squares)
            for layer, collected in statistics.items()
            for (parameter, _), name in self._names[layer].items()
            if parameter == "weight"
        }

    def scale(self, parts: LayerParts) -> None:
        for norm, linear in (
            (parts.attention_norm, parts.qkv),
            (parts.network_norm, parts.gate_up),
        ):
            factors = self._search(linear, self._statistics[linear].magnitudes)
            if factors is not None:
                self._fold_into_norm(norm, linear, factors)
        num_heads, num_kv_heads, _ = parts.qkv.heads
        # All heads that read a value share its factors.
        by_head = self._statistics[parts.output].magnitudes.view(
            num_kv_heads, num_heads // num_kv_heads, -1
        )
        shared = by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)
        factors = self._search(parts.output, shared)
        if factors is not None:
            self._times_inputs(parts.output, factors)
            self._over_outputs(parts.qkv, ("v",), factors.view_as(by_head)[:, 0].reshape(-1))
        factors = self._search(parts.down, self._statistics[parts.down].magnitudes)
        if factors is not None:
            self._times_inputs(parts.down, factors)
            self._over_outputs(parts.gate_up, ("up",), factors)

    def _search(self, linear: Linear, magnitudes: Tensor) -> Tensor | None:
        """The factors with the smallest error of outputs; None: 1 everywhere."""
        weight, inputs = linear.get_parameter("weight"), self._statistics[linear].sampled
        exact = F.linear(inputs, weight)
        means = magnitudes.clamp(min=SMALLEST_MEAN)
        best, least = None, self._error(weight, inputs, exact)
        for exponent in EXPONENTS:
            factors = means.pow(exponent)
            factors = factors / (factors.max() * factors.min()).sqrt()
            error = self._error(weight * factors, inputs / factors, exact)
            if error < least:
                best, least = factors, error
        return best

    def _error(self, weight: Tensor, inputs: Tensor, exact: Tensor) -> float:
        made = self._method.round(weight, self._dtype, search=False)
        rounding = getattr(made, "rounding", None)
        seen = inputs if rounding is None else rounding.round(inputs)
        return float((F.linear(seen, made.dequantize()) - exact).square().sum())

    def _fold_into_norm(self, norm: RMSNorm, linear: Linear, factors: Tensor) -> None:
        """The norm is stored in few bits: factors become what it is divided by after rounding."""
        weight = norm.weight
        stored = (weight / factors).to(self._dtype).float()
        is_kept = (stored != 0) & stored.isfinite() & (weight != 0)
        factors = torch.where(is_kept, weight / torch.where(is_kept, stored, 1), 1)
        self._times_inputs(linear, factors)
        self.adjustments[self._names[norm]["weight", ()]] = Adjustment(over_outputs=factors)

    def _times_inputs(self, linear: Linear, factors: Tensor) -> None:
        for (parameter, _), name in self._names[linear].items():
            if parameter == "weight":
                old = self.adjustments[name]
                assert old.importance is not None
                self.adjustments[name] = replace(
                    old, times_inputs=factors, importance=old.importance / factors.square()
                )

    def _over_outputs(self, linear: Linear, shard_key: ShardKey, factors: Tensor) -> None:
        for (_, key), name in self._names[linear].items():
            if key == shard_key:
                old = self.adjustments.get(name, Adjustment())
                self.adjustments[name] = replace(old, over_outputs=factors)
