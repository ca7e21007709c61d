"""Nothing compiles on a GPU once the engine is ready."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PROGRAM = """
import sys, triton
from quire import LLM, SamplingParams

llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_num_seqs=16,
          kv_cache_memory_bytes=1 << 28, max_num_batched_tokens=256,
          enforce_eager=sys.argv[2] == "eager")
triton.knobs.runtime.jit_post_compile_hook = lambda **made: print("compiled", made["fn"].name)
greedy = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, detokenize=False)
prompts = [[5 + i] * length for i, length in enumerate((1, 2, 3, 20, 100, 300, 17, 64, 5, 9, 128))]
for count in (1, 2, 4, 11):
    llm.generate([{"prompt_token_ids": p} for p in prompts[:count]], greedy, use_tqdm=False)
print("done")
"""


@pytest.mark.parametrize("mode", ["graphs", "eager"])
def test_nothing_compiles_once_ready(tmp_path: Path, mode: str) -> None:
    """Kernels specialise on alignments and divisors of their arguments, which differ from step to
    step. In a process of its own, where nothing has run before."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["done"], done.stdout + done.stderr[-2000:]
