"""Loading holds about one tensor in host memory beside what the model itself takes there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

MIB = 1 << 20
HIDDEN, INNER, KV, VOCAB, LAYERS = 1024, 4096, 256, 8192, 6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
LARGEST = VOCAB * HIDDEN
"""Values of the largest tensor."""

PROGRAM = """
import sys, threading, time, torch
from quire.config.model import load_model_config
from quire.models.loader import load_model

folder, device, dtype = sys.argv[1:]
torch.set_num_threads(1)
torch.zeros(1, device=device)

def private_bytes():
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024

config = load_model_config(folder)
before, peak, done = private_bytes(), [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], private_bytes())
        time.sleep(0.0005)

watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(config, dtype=getattr(torch, dtype), device=device)
done.set()
watcher.join()
packed = [m.packed for layer in model.modules() for m in getattr(layer, "matrices", ())]
weights = [*model.parameters(), *packed]
own = sum(tensor.nbytes for tensor in (*weights, *model.buffers()) if tensor.is_cpu)
assert all(bool((p == 1).all()) for p in weights)
print(own, peak[0] - before)
"""


def make_tensors() -> dict[str, torch.Tensor]:
    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": ones(VOCAB, HIDDEN),
        "lm_head.weight": ones(VOCAB, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}."
        tensors |= {
            layer + "self_attn.q_proj.weight": ones(HIDDEN, HIDDEN),
            layer + "self_attn.k_proj.weight": ones(KV, HIDDEN),
            layer + "self_attn.v_proj.weight": ones(KV, HIDDEN),
            layer + "self_attn.o_proj.weight": ones(HIDDEN, HIDDEN),
            layer + "mlp.gate_proj.weight": ones(INNER, HIDDEN),
            layer + "mlp.up_proj.weight": ones(INNER, HIDDEN),
            layer + "mlp.down_proj.weight": ones(HIDDEN, INNER),
            layer + "input_layernorm.weight": ones(HIDDEN),
            layer + "post_attention_layernorm.weight": ones(HIDDEN),
        }
    return tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model of 196 MiB as one safetensors file and as one pickle."""
    tensors = make_tensors()
    made = {name: tmp_path_factory.mktemp(name) for name in ("safetensors", "bin")}
    for folder in made.values():
        (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, made["safetensors"] / "model.safetensors")
    torch.save(tensors, made["bin"] / "pytorch_model.bin")
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("device", "kind", "dtype"),
    [
        ("cpu", "safetensors", "float32"),
        ("cpu", "bin", "bfloat16"),
        pytest.param("cuda", "safetensors", "bfloat16", marks=pytest.mark.gpu),
        pytest.param("cuda", "safetensors", "float16", marks=pytest.mark.gpu),
        pytest.param("cuda", "bin", "bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_one_tensor_at_a_time(device: str, kind: str, dtype: str, folders: dict[str, Path]) -> None:
    """Also where several tensors become one parameter, or their type changes on the way."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folders[kind]), device, dtype],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    own, growth = map(int, done.stdout.split())
    assert (own > 150 * MIB) == (device == "cpu")
    assert growth - own < LARGEST * 4 + 48 * MIB
