"""The embedded SmolLM2 with its real weights, through the public API.

The reference is transformers with weights that the `gguf` package read and this file put in place;
nothing of Quire's loader takes part in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire import LLM, PoolingParams, SamplingParams
from quire.config.embedded import embedded_model_path

SYSTEM = "You are a helpful assistant. Always be concise."
QUESTIONS = ("What is Python?", "Explain recursion", "What are closures?")
PROMPTS = [
    "The capital of France is",
    "The future of AI is",
    "How does PagedAttention work?",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 4, 5,",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, COUNT(*) FROM",
    "Q: What is the largest planet?\nA:",
    "Les enfants jouent dans",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "import numpy as np\n\nx = np.",
    "Roses are red,\nviolets are",
    "In 1969,",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou answer in one word.<|im_end|>\n<|im_start|>user\nIs fire hot?"
    "<|im_end|>\n<|im_start|>assistant\n",
    "To be, or not to be, that is",
    "The square root of 144 is",
    "Ingredients: flour, sugar, eggs. Method:",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=1024, kv_cache_memory_bytes="256MiB") as engine:
        yield engine


def test_one_line_of_text(llm: LLM) -> None:
    """`LLM()` alone writes sensible text; chat uses the model's template."""
    wanted = SamplingParams(temperature=0.0, max_tokens=8)
    (output,) = llm.generate("The capital of France is", wanted, use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    (answer,) = llm.chat(
        [{"role": "user", "content": "What is 2 + 2? Answer with a number."}],
        SamplingParams(temperature=0.0, max_tokens=12),
        use_tqdm=False,
    )
    assert answer.prompt is not None and answer.prompt.endswith("<|im_start|>assistant\n")
    assert "4" in answer.outputs[0].text


def test_the_system_prompt_is_computed_once(llm: LLM) -> None:
    """Three requests one after the other at block_size=16: from the second on, the part that all
    share comes from the cache although it ends inside a block."""
    assert llm.options.cache.block_size == 16
    wanted = SamplingParams(temperature=0.0, max_tokens=4)
    llm.reset_prefix_cache()
    cached = [
        llm.generate(SYSTEM + question, wanted, use_tqdm=False)[0].num_cached_tokens
        for question in QUESTIONS
    ]
    shared = len(llm.get_tokenizer().encode(SYSTEM))
    assert cached[0] == 0
    assert all(count is not None and count >= shared - 1 for count in cached[1:])


@cache
def read_with_gguf() -> LlamaForCausalLM:
    """transformers' model with the file's weights, dequantised by the gguf package."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(embedded_model_path()).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if match is None:
            name = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm"}[tensor.name]
            state[f"model.{name}.weight"] = torch.from_numpy(values)
            continue
        layer, part = match.groups()
        if part in ("attn_q", "attn_k"):
            values = unpermuted(values, 9 if part == "attn_q" else 3)
        state[f"model.layers.{layer}.{parts[part]}.weight"] = torch.from_numpy(values)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def unpermuted(rows: np.ndarray[Any, np.dtype[np.float32]], heads: int) -> Any:
    """GGUF interleaves the two halves of each head, which its rotation takes as pairs."""
    size = len(rows) // heads
    undone = np.empty_like(rows)
    for head in range(heads):
        for i in range(size // 2):
            undone[head * size + i] = rows[head * size + 2 * i]
            undone[head * size + size // 2 + i] = rows[head * size + 2 * i + 1]
    return undone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp"),
    [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)],
    ids=["alone", "ranks2", "ranks3", "stages2", "ranks2-stages2"],
)
def test_greedy_tokens_are_those_of_transformers(tp: int, pp: int) -> None:
    """20 prompts, 64 tokens each, all at once: equal, or within 1e-3 where two tokens tie. Of 9
    heads and 3 KV heads two ranks have padding, three have none."""
    model = read_with_gguf()
    wanted = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=1)
    assert len(PROMPTS) == 20
    with LLM(
        max_model_len=1024,
        kv_cache_memory_bytes="256MiB",
        dtype="float32",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
    ) as llm:
        outputs = llm.generate(PROMPTS, wanted, use_tqdm=False)
    num_equal = 0
    for output in outputs:
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        made = completion.token_ids
        assert prompt is not None
        with torch.no_grad():
            lines = model(torch.tensor([[*prompt, *made]])).logits[0, len(prompt) - 1 : -1]
        lines = lines.double().log_softmax(-1)
        assert len(made) == 64
        num_equal += made == lines.argmax(-1).tolist()  # as transformers would go on
        assert completion.logprobs is not None
        for token, line, entry in zip(made, lines, completion.logprobs, strict=True):
            assert entry[token].logprob == pytest.approx(float(line[token]), abs=1e-3)
            assert float(line.max() - line[token]) <= 1e-3
    assert num_equal >= 18, "ties are rare"


@pytest.mark.slow
def test_embeddings_are_those_of_transformers() -> None:
    """20 prompts in one batch, some of them in chunks, by the last token and by the mean."""
    model = read_with_gguf()
    with LLM(
        max_model_len=1024,
        kv_cache_memory_bytes="256MiB",
        dtype="float32",
        max_num_batched_tokens=64,
    ) as llm:
        last, mean = (
            llm.embed(PROMPTS, pooling_params=PoolingParams(pooling), use_tqdm=False)
            for pooling in ("last", "mean")
        )
    for by_last, by_mean in zip(last, mean, strict=True):
        with torch.no_grad():
            states = model.model(torch.tensor([by_last.prompt_token_ids])).last_hidden_state[0]
        for output, vector in ((by_last, states[-1]), (by_mean, states.mean(0))):
            expected = torch.nn.functional.normalize(vector, dim=0).numpy()
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
