"""Checkpoints in the formats of quantised models, packed bit by bit as these are described.

Each packer gives the tensors of a matrix, and the matrix that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.reference import save_safetensors

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by the last parts of their names; the matrix in float32."""
Packer = Callable[[Tensor], Packed]
Rounding = Callable[[Tensor], Tensor]


def words(codes: Tensor, bits: int) -> Tensor:
    """[rows, codes] -> int32 [rows, words]: rows are numbers with digits of that many bits."""
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * place for place, code in enumerate(row))
        num_bytes = 4 * -(-len(row) * bits // 32)
        rows.append(np.frombuffer(number.to_bytes(num_bytes, "little"), "<i4"))
    return torch.from_numpy(np.stack(rows).astype(np.int32))


def group_codes(
    weight: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales [outputs, groups], zeros [outputs, groups]) of neighbours in groups."""
    groups = weight.unflatten(1, (-1, group))
    most = 2**bits - 1
    if symmetric:
        scales = (2 * groups.abs().amax(-1) / most).to(dtype)
        zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.float32)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, most)
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, most).flatten(1).int(), scales, zeros.int()


def by_input(values: Tensor, group: int) -> Tensor:
    return values.repeat_interleave(group, 1)


def awq(group: int | None = 32) -> Packer:
    def pack(weight: Tensor) -> Packed:
        size = group or weight.shape[1]
        codes, scales, zeros = group_codes(weight, 4, size, symmetric=False)

        def interleaved(rows: Tensor) -> Tensor:
            # Nibble i of a word is its output [0, 2, 4, 6, 1, 3, 5, 7][i].
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            return words(rows.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

        exact = (codes - by_input(zeros, size)) * by_input(scales.float(), size)
        tensors = {
            "qweight": interleaved(codes.t()),
            "qzeros": interleaved(zeros.t()),
            "scales": scales.t().contiguous(),
        }
        return tensors, exact

    return pack


def gptq(
    bits: int = 4, group: int | None = 32, sym: bool = True, v2: bool = False, order: bool = False
) -> Packer:
    def pack(weight: Tensor) -> Packed:
        num_inputs = weight.shape[1]
        size = group or num_inputs
        places = torch.arange(num_inputs)
        if order:  # the same of all matrices with these inputs
            places = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
        # Input i is quantised as if it lay at places[i].
        moved = torch.empty_like(weight)
        moved[:, places] = weight
        codes, scales, zeros = group_codes(moved, bits, size, sym)
        codes, groups = codes[:, places], places // size
        exact = (codes - zeros[:, groups]) * scales.float()[:, groups]
        stored = zeros if v2 else (zeros - 1) % 2**bits
        tensors = {
            "qweight": words(codes, bits).t().contiguous(),
            "qzeros": words(stored.t(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": groups.int(),
        }
        return tensors, exact

    return pack


def packed(bits: int = 4, group: int | None = 32, sym: bool = True, order: bool = False) -> Packer:
    """By compressed-tensors' own function."""

    def pack(weight: Tensor) -> Packed:
        num_inputs = weight.shape[1]
        size = group or num_inputs
        groups = torch.arange(num_inputs) // size
        if order:
            shuffled = torch.Generator().manual_seed(num_inputs)
            groups = groups[torch.randperm(num_inputs, generator=shuffled)]
        places = groups.argsort(stable=True).argsort()
        moved = torch.empty_like(weight)
        moved[:, places] = weight
        codes, scales, zeros = group_codes(moved, bits, size, sym, torch.bfloat16)
        codes = codes[:, places]
        half = 2 ** (bits - 1)
        tensors = {
            "weight_packed": pack_to_int32((codes - half).to(torch.int8), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            signed = (zeros - half).to(torch.int8)
            tensors["weight_zero_point"] = pack_to_int32(signed, bits, packed_dim=0)
        if order:
            tensors["weight_g_idx"] = groups.int()
        return tensors, (codes - zeros[:, groups]) * scales.float()[:, groups]

    return pack


def mxfp4() -> Packer:
    """By compressed-tensors' own class."""
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def pack(weight: Tensor) -> Packed:
        largest = weight.unflatten(1, (-1, 32)).abs().amax(-1)
        scales = torch.exp2(torch.floor(torch.log2(largest)) - 1)
        state = {"weight": weight, "weight_scale": scales}
        tensors = dict(MXFP4PackedCompressor.compress(state, scheme))
        exact = MXFP4PackedCompressor.decompress(tensors, scheme)["weight"]
        return {name: tensors[name] for name in ("weight_packed", "weight_scale")}, exact.float()

    return pack


def scaled(
    strategy: str = "tensor",
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float8_e4m3fn,
    name: str = "weight_scale",
    input_scale: float | None = None,
    input_zero: int | None = None,
    has_zeros: bool = False,
    largest: float | None = None,
) -> Packer:
    if largest is None:
        largest = 448.0 if dtype == torch.float8_e4m3fn else 127.0

    def pack(weight: Tensor) -> Packed:
        if strategy == "tensor":
            scales = (weight.abs().max() / largest).reshape(())
            wide = scales.expand(weight.shape)
        elif strategy == "channel":
            scales = weight.abs().amax(1, keepdim=True) / largest
            wide = scales.expand(weight.shape)
        else:
            height, width = block
            rows = [part.split(width, 1) for part in weight.split(height)]
            scales = torch.stack([torch.stack([one.abs().max() for one in row]) for row in rows])
            scales /= largest
            wide = scales.repeat_interleave(height, 0)[: len(weight)]
            wide = wide.repeat_interleave(width, 1)[:, : weight.shape[1]]
        numbers, wide_zeros = weight / wide, torch.zeros(())
        tensors = {name: scales}
        if has_zeros:
            assert strategy == "block" and dtype == torch.int8
            zeros = torch.arange(scales.numel()).view(scales.shape) % 11 - 5
            tensors["weight_zero_point"] = zeros.to(torch.int8)
            wide_zeros = zeros.repeat_interleave(height, 0)[: len(weight)]
            wide_zeros = wide_zeros.repeat_interleave(width, 1)[:, : weight.shape[1]]
            numbers = (numbers + wide_zeros).clamp(-128, 127)
        values = (numbers if dtype.is_floating_point else numbers.round()).to(dtype)
        tensors["weight"] = values
        if input_scale is not None:
            tensors["input_scale"] = torch.tensor(input_scale)
        if input_zero is not None:
            tensors["input_zero_point"] = torch.tensor([input_zero], dtype=torch.int8)
        return tensors, (values.float() - wide_zeros) * wide

    return pack


def fp8_tokens(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def fp8_static(scale: float) -> Rounding:
    return lambda x: (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def fp8_groups(x: Tensor) -> Tensor:
    return torch.cat([fp8_tokens(part) for part in x.split(128, -1)], -1)


def int8_tokens(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def int8_static(scale: float, zero: int) -> Rounding:
    return lambda x: (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale


@dataclass(frozen=True)
class Case:
    """A format for all matrices of the layers, or for some by a part of their names."""

    config: dict[str, Any]
    packer: Packer
    others: dict[str, Packer | None]
    """None: not quantised."""
    rounding: Rounding | None = None
    file: str | None = None
    """Where the configuration is, if not in config.json."""
    v_rounding: Rounding | None = None
    """Where that of values is another one."""

    def rounding_for(self, name: str) -> Rounding | None:
        if self.packer_for(name) is None:
            return None
        return self.v_rounding if self.v_rounding and "v_proj" in name else self.rounding

    def packer_for(self, name: str) -> Packer | None:
        if ".layers." not in name or not name.endswith("proj.weight"):
            return None
        for part, packer in self.others.items():
            if part in name:
                return packer
        return self.packer


def case(
    config: dict[str, Any],
    packer: Packer,
    others: dict[str, Packer | None] | None = None,
    rounding: Rounding | None = None,
    file: str | None = None,
    v_rounding: Rounding | None = None,
) -> Case:
    return Case(config, packer, others or {}, rounding, file, v_rounding)


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **others: Any) -> Any:
    """quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **others,
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_TOKENS = {**TOKENS, "type": "float"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

CASES: dict[str, Case] = {
    "awq": case(AWQ, awq()),
    "awq of old": case({"w_bit": 4, "q_group_size": -1}, awq(None), file="quant_config.json"),
    "gptq": case(GPTQ, gptq()),
    "gptq 2": case({**GPTQ, "bits": 2, "sym": False}, gptq(2, sym=False)),
    "gptq 3": case({**GPTQ, "bits": 3}, gptq(3)),
    "gptq 3 asym v2": case(
        {**GPTQ, "bits": 3, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(3, sym=False, v2=True),
    ),
    "gptq asym order": case({**GPTQ, "sym": False, "desc_act": True}, gptq(sym=False, order=True)),
    "gptq 8 rows": case(
        {"bits": 8, "group_size": -1, "sym": True}, gptq(8, None), file="quantize_config.json"
    ),
    "gptq dynamic": case(
        {
            **GPTQ,
            "dynamic": {
                r"-:.*\.o_proj": {},
                r"+:.*\.1\..*v_proj": {"bits": 8, "group_size": 16},
                r"+:.*\.up_proj": {"bits": 2},
            },
        },
        gptq(),
        {"o_proj": None, "1.self_attn.v_proj": gptq(8, 16), "up_proj": gptq(2)},
    ),
    "fp8": case(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, scaled(), rounding=fp8_tokens
    ),
    "fp8 static": case(
        {"quant_method": "fp8", "activation_scheme": "static"},
        scaled(input_scale=0.03),
        {"v_proj": scaled(input_scale=0.02)},
        fp8_static(0.03),
        v_rounding=fp8_static(0.02),
    ),
    "fp8 block": case(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
        scaled("block", name="weight_scale_inv"),
        rounding=fp8_groups,
    ),
    "fp8 block of one row": case(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 128],
            "modules_to_not_convert": ["lm_head"],
        },
        scaled("block", (1, 128), name="weight_scale_inv"),
        rounding=fp8_groups,
    ),
    "modelopt": case(
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        scaled(input_scale=0.03),
        rounding=fp8_static(0.03),
        file="hf_quant_config.json",
    ),
    "w4a16": case(compressed(INT4, format="pack-quantized"), packed()),
    "w4a16 asym order": case(
        compressed({**INT4, "symmetric": False, "actorder": "group"}, format="pack-quantized"),
        packed(sym=False, order=True),
    ),
    "w3a16 asym": case(
        compressed({**INT4, "num_bits": 3, "symmetric": False}, format="pack-quantized"),
        packed(3, sym=False),
    ),
    "w2a16": case(compressed({**INT4, "num_bits": 2}, format="pack-quantized"), packed(2)),
    "w8a16": case(compressed(INT8, format="pack-quantized"), packed(8, None)),
    "w8a8": case(
        compressed(INT8, TOKENS, format="int-quantized"),
        scaled("channel", dtype=torch.int8),
        rounding=int8_tokens,
    ),
    "w4a8": case(
        compressed({**INT8, "num_bits": 4}, FP8_TOKENS, format="int-quantized"),
        scaled("channel", dtype=torch.int8, largest=7),
    ),
    "w8a8 static": case(
        compressed(
            {**INT8, "strategy": "tensor"},
            {**TOKENS, "strategy": "tensor", "dynamic": False, "symmetric": False},
            format="int-quantized",
        ),
        scaled(dtype=torch.int8, input_scale=0.1, input_zero=5),
        rounding=int8_static(0.1, 5),
    ),
    "w8 without inputs": case(
        compressed(INT8, format="int-quantized"), scaled("channel", dtype=torch.int8)
    ),
    "w8 tiles asym": case(
        compressed(
            {**INT8, "symmetric": False, "strategy": "block", "block_structure": [32, 32]},
            format="int-quantized",
        ),
        scaled("block", (32, 32), torch.int8, has_zeros=True),
    ),
    "fp8 channel": case(
        compressed(FP8, FP8_TOKENS, format="float-quantized"),
        scaled("channel"),
        rounding=fp8_tokens,
    ),
    "fp8 groups": case(
        compressed({**FP8, "strategy": "group", "group_size": 32}, format="naive-quantized"),
        scaled("block", (1, 32)),
    ),
    "fp8 block of others": case(
        compressed(
            {**FP8, "strategy": "block", "block_structure": [128, 128]},
            {**FP8_TOKENS, "strategy": "group", "group_size": 128},
            format="float-quantized",
        ),
        scaled("block"),
        rounding=fp8_groups,
    ),
    "mixed": case(
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "a": {"targets": ["re:.*mlp.*"], "weights": INT4, "format": "pack-quantized"},
                "b": {
                    "targets": ["re:.*self_attn.*"],
                    "weights": FP8,
                    "format": "float-quantized",
                },
            },
            "ignore": ["lm_head", "re:.*k_proj"],
        },
        packed(),
        {"k_proj": None, "self_attn": scaled("channel")},
    ),
    "mxfp4": case(
        compressed(
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
            format="mxfp4-pack-quantized",
        ),
        mxfp4(),
    ),
}


def quantized_tensors(model: PreTrainedModel, one: Case) -> dict[str, Tensor]:
    """What a checkpoint of the model in some format holds; the model gets the numbers of it."""
    stored: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        packer = one.packer_for(name)
        if packer is None:
            stored[name] = tensor.clone()
            continue
        parts, exact = packer(tensor)
        stored |= {name.removesuffix("weight") + key: part for key, part in parts.items()}
        tensor.copy_(exact)
    return stored


def save_quantized(model: PreTrainedModel, folder: Path, one: Case) -> dict[str, Tensor]:
    """A folder as users find it; the model gets the numbers in it."""
    save_safetensors(model, folder)
    stored = quantized_tensors(model, one)
    save_file(stored, folder / "model.safetensors")
    file = folder / "config.json"
    if one.file is None:
        described = {**json.loads(file.read_text()), "quantization_config": one.config}
    else:
        file, described = folder / one.file, one.config
    file.write_text(json.dumps(described))
    return stored


MIXTRAL_NAMES = ("block_sparse_moe", "w1", "w3", "w2")
"""The block of experts, and an expert's matrices of gate, up and down."""
ROUTERS = (".gate", ".shared_expert_gate")


def expert_tensors(
    model: PreTrainedModel,
    packer: Packer | None = None,
    dtype: torch.dtype = torch.float32,
    names: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj"),
) -> dict[str, Tensor]:
    """What a checkpoint of a mixture holds, each expert under a name of its own, matrices of layers
    quantised but for routers. The model gets the numbers of it."""
    block, gate, up, down = names
    found: dict[str, Tensor] = {}

    def add(name: str, weight: Tensor) -> None:
        is_matrix = ".layers." in name and weight.dim() == 2
        module = name.removesuffix(".weight")
        if packer is not None and is_matrix and not module.endswith(ROUTERS):
            parts, exact = packer(weight)
            found.update({f"{module}.{key}": part for key, part in parts.items()})
            weight.copy_(exact)
            return
        is_exact = name.endswith("e_score_correction_bias")
        found[name] = weight.to(torch.float32 if is_exact else dtype).clone()
        weight.copy_(found[name])

    for name, tensor in model.state_dict().items():
        name = name.replace(".mlp.", f".{block}.")
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith("experts"):
            add(name, tensor)
            continue
        for number, one in enumerate(tensor):
            parts = zip((gate, up), one.chunk(2), strict=True)
            for part, weight in [(down, one)] if last == "down_proj" else parts:
                add(f"{prefix}.{number}.{part}.weight", weight)
    return found
