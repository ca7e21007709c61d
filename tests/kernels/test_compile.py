"""Kernels compiled side by side, for a GPU that need not be there: nothing is launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quire.kernels.triton.compile import CompilingTogether
from quire.kernels.triton import activation, norm

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda **made: compiled.append(made["fn"].name)
x, weight = torch.ones(2, 64).bfloat16(), torch.ones(64).bfloat16()

@triton.jit
def broken(x_ptr):
    triton.language.no_such_thing(x_ptr)

# Compiled before: a launch would fail, since there is no such GPU.
norm._rms_norm_kernel.warmup(x, x, weight, x, 1e-5, 64, 64, None, 0, None, None,
                             HAS_RESIDUAL=False, GROUP=64, LARGEST=0.0, WIDTH=64, OVERLAPS=False,
                             grid=(2,), num_warps=1)
assert len(compiled) == 1
compiled.clear()
with CompilingTogether(2):
    for _ in range(2):
        activation.silu_and_mul(x)
        norm.rms_norm(x, weight, 1e-5)
        broken[(1,)](x)
    assert not compiled, "compiled kernels are taken in at the end"
assert {name.split(".")[-1] for name in compiled} == {"_silu_and_mul_kernel"}, compiled
cached = activation._silu_and_mul_kernel.device_caches[0][0]
assert [kernel.asm["ptx"][:2] for kernel in cached.values()] == ["//"]
assert not broken.device_caches[0][0], "what does not compile is tried again when it is launched"
print("done")
"""


ATTENTION = """
import sys, numpy as np, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quire.kernels.triton.compile import CompilingTogether
from quire.layers.attention import triton_prefill
from quire.layers.attention.backend import AttentionInputs
from quire.layers.attention.shared_prefix import PrefixTiles
from quire.layers.attention.triton import TritonBackend

TARGETS = {"amd": GPUTarget("hip", "gfx90a", 64), "turing": GPUTarget("cuda", 75, 32)}
triton_prefill.is_turing = lambda device: sys.argv[1] == "turing"

class Driver:
    get_current_target = staticmethod(lambda: TARGETS[sys.argv[1]])
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())

def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)

def send(*arrays):
    return [torch.from_numpy(array) for array in arrays]

kv, q = torch.zeros(1, 2, 4, 2, 16, 128).half(), torch.zeros(12, 8, 128).half()
backend = TritonBackend(kv, 8, 2, 128, 16)
tiles = PrefixTiles(ints(4), ints(1), ints(1, backend.prefix_members))
lens = np.array([1, 1, 1, 1, 8], np.int32)
inputs = AttentionInputs(ints(6), ints(5), ints(5, 8), ints(12).long(), lens, send, tiles)
with CompilingTogether(2) as together:
    backend.plan(inputs).attend_prepared(0, q, 0.1, None, None, torch.zeros(8))
failed = [job.exception() for job in together._jobs.values() if job.exception()]
assert not failed, failed
made = [job.result() for job in together._jobs.values()]
assert len(made) == 4, made  # prefix, decode, merge, prefill
assert max(kernel.metadata.shared for kernel in made) <= 1 << 16
print("done")
"""

HOPPER = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quire.kernels.hopper import prefill_attention as hopper
from quire.kernels.triton.compile import CompilingTogether

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
hopper._multiprocessors = lambda device: 4
ints = [torch.zeros(shape, dtype=torch.int32) for shape in (2, 1, (1, 8), 1, 1)]
kv, q = torch.zeros(2, 4, 2, 16, 64).bfloat16(), torch.zeros(12, 8, 64).bfloat16()
with CompilingTogether(2) as together:
    for softcap, sinks in ((None, None), (50.0, torch.zeros(8))):
        out = torch.empty_like(q)
        hopper.prefill_attention(q, kv, *ints, 0.1, 40, out, softcap=softcap, sinks=sinks)
failed = [job.exception() for job in together._jobs.values() if job.exception()]
assert not failed, failed
assert len(together._jobs) == 2
assert max(job.result().metadata.shared for job in together._jobs.values()) <= 227 << 10
print("done")
"""

LATENT = """
import sys, numpy as np, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quire.config.latent import LatentConfig
from quire.kernels.triton import decode_attention, latent_attention, latent_cache
from quire.kernels.triton.compile import CompilingTogether
from quire.layers.attention import mla
from quire.layers.attention.backend import AttentionInputs, KVScales
from quire.layers.attention.layer import LatentQKV, Rotation

TARGETS = {
    "amd": (GPUTarget("hip", "gfx90a", 64), 64),
    "ampere": (GPUTarget("cuda", 86, 32), 99),
    "hopper": (GPUTarget("cuda", 90, 32), 227),
}
TARGET, KIBIBYTES = TARGETS[sys.argv[1]]
HEADS, KIND = int(sys.argv[2]), getattr(torch, sys.argv[3])
mla.has_little_memory = lambda: sys.argv[1] == "amd"
mla.is_hopper = lambda device: sys.argv[1] == "hopper"
mla.MAX_CHUNK = 64
if sys.argv[1] == "hopper":
    for module in (decode_attention, latent_attention, latent_cache):
        module.launch_options = lambda tensor: {"OVERLAPS": True, "launch_pdl": True}

class Driver:
    get_current_target = staticmethod(lambda: TARGET)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())

def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)

def halves(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)

def send(*arrays):
    return [torch.from_numpy(array) for array in arrays]

class Expansion:
    dense_weight = halves(HEADS * 256, 512)
    to_latent = staticmethod(lambda q: halves(len(q), HEADS, 512))
    from_latent = staticmethod(lambda x: halves(len(x), HEADS, 128))

scales = KVScales(halves(1, 4, 1, 16, 1), torch.zeros(1, 2, 1)) if KIND.itemsize == 1 else None
cache, config = halves(1, 1, 4, 1, 16, 576).to(KIND), LatentConfig(None, 512, 128, 64, 128)
backend = mla.LatentBackend(cache, HEADS, 1, 576, 16, scales, config)
lens = np.array([1, 1, 2, 20, 200], np.int32)
starts, count = torch.tensor([0, *lens.cumsum()]).int(), int(lens.sum())
angles = torch.zeros(10, 32)
rotation = Rotation(angles, angles, torch.zeros(count).long(), True)
projected = halves(count, HEADS, 192), halves(count, 576), halves(512)
qkv = LatentQKV(*projected, 1e-6, rotation, Expansion())
with CompilingTogether(2) as together:
    for queries in (1, 8):
        inputs = AttentionInputs(
            starts, ints(5), ints(5, 100), ints(count).long(), lens, send,
            decode_queries=queries, max_context_lens=lens,
        )
        backend.plan(inputs).attend(0, qkv, 0.1, None)
failed = [job.exception() for job in together._jobs.values() if job.exception()]
assert not failed, failed
made = [job.result() for job in together._jobs.values()]
# Write, gather, attend to what was expanded, merge for each number of queries; decode with each and
# tiles.
assert len(made) == 8, made
assert max(kernel.metadata.shared for kernel in made) <= KIBIBYTES << 10, made
print("done")
"""

GROUPED = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quire.kernels.torch.quantized_weights import GroupedWeights
from quire.kernels.triton import finish_product, grouped_matrix
from quire.kernels.triton.compile import CompilingTogether

CAPABILITY, SHARED_BYTES = int(sys.argv[1]), int(sys.argv[2])
grouped_matrix.shared_bytes = lambda device: SHARED_BYTES
grouped_matrix.multiplies_ahead = lambda device: CAPABILITY == 90
KIND = torch.bfloat16 if CAPABILITY == 90 else torch.half
if CAPABILITY == 90:
    for module in (grouped_matrix, finish_product):
        module.launch_options = lambda tensor: {"OVERLAPS": True, "launch_pdl": True}
grouped_matrix.GroupedMatrix.unpacks_natively = lambda self, dtype: self.low_bits == 4

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", CAPABILITY, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
codes, scales = torch.zeros(256, 1024, dtype=torch.uint8), torch.ones(256, 8).to(KIND)
with CompilingTogether(2) as together:
    for bits in (4, 8):
        matrix = grouped_matrix.pack_grouped(GroupedWeights(codes, bits, scales, 128), scales.dtype)
        for tokens in (1, 16, 64):
            matrix.multiply(torch.zeros(tokens, 1024).to(KIND), torch.zeros(256).to(KIND))
made = [job.result() for job in together._jobs.values()]
assert len(made) == 6, made
assert max(kernel.metadata.shared for kernel in made) <= SHARED_BYTES, made
print("done")
"""

EXPERTS = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quire.config.experts import ClampedGate, ExpertsConfig
from quire.kernels.torch.experts import Routing
from quire.kernels.torch.quantized_weights import GroupedWeights
from quire.kernels.triton import expert_tiles, experts, gemv, grouped_experts, grouped_matrix
from quire.kernels.triton import routing
from quire.kernels.triton.compile import CompilingTogether

CAPABILITY, SHARED_BYTES = int(sys.argv[1]), int(sys.argv[2])
for module in (experts, grouped_experts):
    module.shared_bytes = lambda device: SHARED_BYTES
grouped_matrix.multiplies_ahead = lambda device: CAPABILITY == 90
KIND = torch.bfloat16 if CAPABILITY == 90 else torch.half
NATIVE = []

def unpacks_natively(matrix, dtype):
    NATIVE.append(matrix.low_bits == 4 and matrix.high is None and not matrix.is_e2m1)
    return NATIVE[-1]

grouped_matrix.GroupedMatrix.unpacks_natively = unpacks_natively
if CAPABILITY == 90:
    for module in (expert_tiles, experts, gemv, grouped_experts, grouped_matrix, routing):
        module.launch_options = lambda tensor: {"OVERLAPS": True, "launch_pdl": True}

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", CAPABILITY, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
E, TOP_K, H, I = map(int, sys.argv[3:7])
KINDS = sys.argv[7:]
float8 = torch.float8_e4m3fn if CAPABILITY >= 89 else torch.uint8

def dense(outputs, inputs):
    return experts.DenseExperts(torch.empty(E, outputs, inputs, dtype=KIND))

def blocks(outputs, inputs):
    values = torch.empty(E, outputs, inputs, dtype=float8)
    scales = torch.zeros(E, -(-outputs // 128), -(-inputs // 128))
    return experts.DenseExperts(values, scales, (128, 128))

def four_bits(outputs, inputs, is_e2m1):
    codes = torch.zeros(outputs, inputs, dtype=torch.uint8)
    scales = torch.ones(outputs, inputs // 32).to(KIND)
    weights = GroupedWeights(codes, 4, scales, 32, is_e2m1=is_e2m1)
    return grouped_experts.stack_grouped([grouped_matrix.pack_grouped(weights, KIND)] * 2)

def int4(outputs, inputs):
    return four_bits(outputs, inputs, False)

def mxfp4(outputs, inputs):
    return four_bits(outputs, inputs, True)

with CompilingTogether(2) as together:
    for scoring in ("softmax", "softmax_of_chosen", "sigmoid"):
        grouped_choice = ExpertsConfig(160, 6, I, (True,), scoring, num_groups=8, top_groups=3)
        for config in (grouped_choice, ExpertsConfig(E, TOP_K, I, (True,), scoring)):
            for logits in (torch.zeros(2, config.count), torch.zeros(2, config.count).to(KIND)):
                routing.route(logits, config, torch.zeros(config.count))
    weight = torch.zeros(E, H).to(KIND)
    gemv.gemv(torch.zeros(1, H).to(KIND), weight, out=torch.zeros(1, E))
    for kind in KINDS:
        make = {"dense": dense, "blocks": blocks, "int4": int4, "mxfp4": mxfp4}[kind]
        layers, options = (make(2 * I, H), make(H, I)), ()
        if kind == "mxfp4":  # as gpt-oss has them
            biases = (torch.zeros(layers[0].num_experts, size).to(KIND) for size in (2 * I, H))
            options = (0, *biases, ClampedGate(7.0, 1.702))
        for tokens in [1, *experts.kernel_changes(layers[0].num_experts, TOP_K)]:
            chosen = Routing(torch.zeros(tokens, TOP_K).int(), torch.zeros(tokens, TOP_K))
            experts.expert_mlp(torch.zeros(tokens, H).to(KIND), chosen, *layers, *options)
failed = [job.exception() for job in together._jobs.values() if job.exception()]
assert not failed, failed
assert ("int4" in KINDS) == any(NATIVE)
made = [job.result() for job in together._jobs.values()]
over = [(one.name, one.metadata.shared) for one in made if one.metadata.shared > SHARED_BYTES]
assert not over, over
print("done")
"""

ADAPTERS = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quire.kernels.adapter_pool import AdapterPool, AdapterSlice, AdapterTokens, LayerAdapters
from quire.kernels.triton import lora
from quire.kernels.triton.compile import CompilingTogether

TARGETS = {
    "amd": GPUTarget("hip", "gfx90a", 64),
    "turing": GPUTarget("cuda", 75, 32),
    "hopper": GPUTarget("cuda", 90, 32),
}
KIND = torch.float16 if sys.argv[1] == "turing" else torch.bfloat16
if sys.argv[1] == "hopper":
    lora.precision = lambda chunks: "ieee" if chunks.dtype == torch.float32 else "tf32"
    lora.launch_options = lambda tensor: {"OVERLAPS": True, "launch_pdl": True}

class Driver:
    get_current_target = staticmethod(lambda: TARGETS[sys.argv[1]])
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())

def layer(dtype):
    state = torch.zeros(4, 12, dtype=torch.int32)
    pool = AdapterPool(torch.zeros(8, 100000, dtype=dtype), state[:, :4])
    slices = [
        AdapterSlice(i * 512, 512, 1024, 0, 1024, 9000, 512, 20000, 21000, state[:, 4], state[:, 8])
        for i in range(3)
    ]
    return LayerAdapters.of(pool, slices)

with CompilingTogether(2) as together:
    for dtype in (torch.float32, KIND):
        adapters, bias = layer(dtype), torch.zeros(1536, dtype=dtype)
        for count in (1, 100, 1000, 2000):
            slots = torch.zeros(count, dtype=torch.int32)
            tokens = AdapterTokens(slots, lora.tiles_by_adapter(slots, 4))
            x, out = torch.zeros(count, 1024, dtype=dtype), torch.zeros(count, 1536, dtype=dtype)
            lora.add_adapters(x, out, bias, adapters, tokens)
        one = LayerAdapters.of(adapters.pool, adapters.slices[:1])
        lora.add_to_embedding(slots.long(), out, one, tokens)
failed = [job.exception() for job in together._jobs.values() if job.exception()]
assert not failed, failed
made = [job.result() for job in together._jobs.values()]
# Of each type: both products for a token and for three sizes of tiles, embeddings; and the sort.
assert len(made) >= 2 * (2 * 4 + 1), len(made)
assert max(kernel.metadata.shared for kernel in made) <= 1 << 16, made
print("done")
"""


def test_kernels_are_compiled_and_not_launched(tmp_path: Path) -> None:
    run(PROGRAM, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("target", "heads"), [("hopper", 16), ("hopper", 128), ("ampere", 16), ("amd", 16)]
)
def test_latent_attention_fits_into_shared_memory(
    target: str, heads: int, kind: str, tmp_path: Path
) -> None:
    """Of each GPU, with the sizes of all released models."""
    run(LATENT, tmp_path, target, str(heads), kind)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["amd", "turing"])
def test_attention_compiles_for_gpus_with_less_to_offer(target: str, tmp_path: Path) -> None:
    """No products that they do not have, and no more than their 64 KiB of shared memory."""
    run(ATTENTION, tmp_path, target)


@pytest.mark.slow
def test_attention_to_prompts_compiles_for_hopper(tmp_path: Path) -> None:
    run(HOPPER, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "kib"), [("75", 64), ("80", 163), ("89", 99), ("90", 227)])
def test_products_of_few_bits_fit_into_shared_memory(
    capability: str, kib: int, tmp_path: Path
) -> None:
    """Of Turing, A100, Ada (and consumer Ampere), and Hopper."""
    run(GROUPED, tmp_path, capability, str(kib << 10))


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "kib"), [("75", 64), ("90", 227)])
def test_experts_fit_into_shared_memory(capability: str, kib: int, tmp_path: Path) -> None:
    """Of Turing, which has the least, and Hopper, which holds inputs for longer."""
    sizes = ("2", "2", "512", "256")
    run(EXPERTS, tmp_path, capability, str(kib << 10), *sizes, "dense", "blocks", "int4", "mxfp4")


RELEASED_EXPERTS = {
    "mixtral-8x7b": ("8", "2", "4096", "14336", "dense"),
    "qwen3-30b-a3b": ("128", "8", "2048", "768", "dense"),
    "deepseek-v2-lite": ("64", "6", "2048", "1408", "dense"),
    "deepseek-v3": ("256", "8", "7168", "2048", "blocks"),
    "gpt-oss-20b": ("32", "4", "2880", "2880", "mxfp4"),
}
"""Experts, how many of them a token has, hidden size, width, and as what their weights are kept."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED_EXPERTS)
def test_experts_of_released_models_compile_for_hopper(name: str, tmp_path: Path) -> None:
    run(EXPERTS, tmp_path, "90", str(227 << 10), *RELEASED_EXPERTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["amd", "turing", "hopper"])
def test_adapters_compile(target: str, tmp_path: Path) -> None:
    """For a token by itself and for tiles of all sizes, in 64 KiB of shared memory."""
    run(ADAPTERS, tmp_path, target)


def run(text: str, tmp_path: Path, *arguments: str) -> None:
    """In a process of its own, because the GPU that it pretends to have would stay."""
    program = tmp_path / "program.py"
    program.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr[-3000:]
