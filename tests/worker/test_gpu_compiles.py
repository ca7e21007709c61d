"""Nothing compiles on a GPU once the engine is ready."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    "vocab_size": 520,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
PROGRAM = """
import sys, numpy, torch, triton
from quire import LLM, SamplingParams
from quire.decoding.masks import MaskTensors

llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_num_seqs=80,
          kv_cache_memory_bytes=1 << 28, max_num_batched_tokens=256,
          enforce_eager=sys.argv[2] == "eager")
triton.knobs.runtime.jit_post_compile_hook = lambda **made: print("compiled", made["fn"].name)
lengths = (1, 2, 3, 20, 100, 300, 17, 64, 5, 9, 128) * 7
prompts = [[5 + i % 50] * length for i, length in enumerate(lengths)]
shared = [[7] * 400 + prompt for prompt in prompts[:40]]
kinds = [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_k": 9, "top_p": 0.8}, {"min_p": 0.1},
         {"presence_penalty": 0.5}, {"logprobs": 2}, {"temperature": 0.0, "logit_bias": {5: 1.0}}]
params = [SamplingParams(max_tokens=7, detokenize=False, **kinds[i % 7]) for i in range(77)]
for work in (prompts[:1], prompts[:2], prompts[:5], prompts[:11], prompts, shared):
    for some in (params[: len(work)], params[:1] * len(work)):
        llm.generate([{"prompt_token_ids": p} for p in work], some, use_tqdm=False)
for count in range(1, 9):  # of grammars, which need a tokenizer
    device = torch.device("cuda")
    masks = MaskTensors(numpy.arange(count, dtype=numpy.int32), 17, device)
    masks.bits[:] = 5
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros((8, 520), dtype=dtype, device=device)
        masks.apply(logits)
        assert logits.isfinite().sum().item() == 17 * 2 * count + 520 * (8 - count)
print("done")
"""


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("mode", ["graphs", "eager"])
def test_nothing_compiles_once_ready(tmp_path: Path, mode: str, experts: dict[str, Any]) -> None:
    """Kernels specialise on alignments and divisors of their arguments, which differ from step to
    step. In a process of its own, where nothing has run before."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | experts))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["done"], done.stdout + done.stderr[-2000:]
