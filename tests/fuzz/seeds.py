"""Writes the inputs that fuzzing begins with: `python -m tests.fuzz.seeds`."""

from __future__ import annotations

import io
import json
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save

from quire.protocol.codec import encode
from quire.protocol.messages import AbortRequest, AddRequest, Command, Outputs, Reply
from quire.protocol.output import FinishedSequence, StepOutput
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams
from tests.files.test_gguf_header import write_gguf
from tests.fuzz.target import CORPUS
from tests.server.hostile import VALID
from tests.text.tool_calls.test_call_formats import CALLS, CONTENT

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {"role": "assistant", "content": "Hi", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]


def gguf_files(folder: Path) -> Iterator[bytes]:
    sizes: dict[str, Any] = {"embedding_length": 32, "attention.head_count_kv": 2}
    width = np.ones((20, 32), np.float32)
    for name, arch, tensors in (
        ("floats", "llama", {"token_embd.weight": width, "blk.0.attn_q.weight": width[:8]}),
        ("halves", "qwen3", {"token_embd.weight": width.astype(np.float16)}),
        ("gpt2", "gpt2", {"token_embd.weight": width, "blk.0.attn_qkv.bias": width[0]}),
    ):
        path = write_gguf(folder / name, arch, tensors=tensors, **sizes)
        yield path.read_bytes()
    yield _with_tokenizer(folder / "tokenizer", "gpt2")
    yield _with_tokenizer(folder / "pieces", "llama")


def _with_tokenizer(path: Path, kind: str) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 32)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("llama.rope.scaling.type", "yarn")
    writer.add_float32("llama.rope.scaling.factor", 2.0)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("llama-bpe")
    tokens = ["<s>", "</s>", "H", "e", "l", "o", "He", "ll", "\u2581", "<0x41>"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1, 1, 6])
    if kind == "llama":
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        writer.add_token_merges(["H e", "l l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    blocks = gguf.quants.quantize(np.ones((10, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    kind_of_blocks = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=kind_of_blocks)
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=kind_of_blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def safetensors_files() -> Iterator[bytes]:
    yield save({"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(2, 4).half()})
    kinds = (torch.bfloat16, torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn)
    yield save({f"t{i}": torch.ones(3).to(kind) for i, kind in enumerate(kinds)}, {"format": "pt"})


def sentencepiece_files() -> Iterator[bytes]:
    def field(number: int, body: bytes) -> bytes:
        return bytes([number << 3 | 2, len(body) & 0x7F | 0x80, len(body) >> 7]) + body

    def piece(text: str, kind: int) -> bytes:
        inner = field(1, text.encode()) + b"\x15\x00\x00\x80\xbf" + bytes([0x18, kind])
        return field(1, inner)

    words = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("\u2581", 1), ("H", 1), ("e", 1), ("He", 1)]
    pieces = b"".join(piece(text, kind) for text, kind in [*words, ("<0x41>", 6), ("<x>", 4)])
    for model_type in (1, 2):
        trainer = bytes([0x18, model_type]) + b"\x98\x02\x01\xc0\x02\x00"
        yield pieces + field(2, trainer) + field(3, b"\x18\x01\x20\x01")
    charsmap = (1024).to_bytes(4, "little") + bytes(1024) + b"x\0"
    yield pieces + field(2, b"\x18\x01") + field(3, field(2, charsmap))


Q = "base_model.model.model.layers.0.self_attn.q_proj"
EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def adapter_folders() -> Iterator[bytes]:
    plain: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    pair = {f"{Q}.lora_A.weight": torch.ones(2, 4), f"{Q}.lora_B.weight": torch.ones(4, 2)}
    dora = {**pair, f"{Q}.lora_magnitude_vector": torch.ones(4)}
    stacked = {
        f"{EXPERTS}.base_layer.lora_A.weight": torch.ones(4, 4),
        f"{EXPERTS}.base_layer.lora_B.weight": torch.ones(8, 4),
        f"{EXPERTS}.lora_A.weight": torch.ones(4, 4),
        f"{EXPERTS}.lora_B.weight": torch.ones(4, 4),
    }
    targets = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    patterns = {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {".*q_proj": 2}}
    for config, tensors in (
        ({**plain, **patterns}, pair),
        ({**plain, "use_dora": True, "use_rslora": True}, dora),
        ({**plain, **targets}, {**stacked, "base_model.model.lm_head.weight": torch.ones(4, 4)}),
    ):
        data = save(tensors)
        yield _json(config) + b"\n" + data[8 : 8 + int.from_bytes(data[:8], "little")]


def adapter_pickles() -> Iterator[bytes]:
    pair = {f"{Q}.lora_A.weight": torch.ones(4, 6), f"{Q}.lora_B.weight": torch.ones(5, 4)}
    for tensors in (pair, {name: tensor.half() for name, tensor in pair.items()}):
        room = io.BytesIO()
        torch.save(OrderedDict(tensors), room)
        with zipfile.ZipFile(room) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            yield archive.read(name)


def messages() -> Iterator[bytes]:
    tokens = np.arange(5, dtype=np.int32)
    request = NewRequest(1, "a#1", tokens, SamplingParams(n=2, stop=["x"]), 1.5, (0,))
    yield encode(AddRequest(1, request))
    yield encode(AbortRequest("a#1", "abort", 1))
    yield encode(Command(2, "pause", {"mode": "hold"}))
    yield encode(Reply(3))
    yield encode(Outputs(StepOutput(finished=[FinishedSequence(1, tokens, "stop")])))


def chats() -> Iterator[bytes]:
    yield _json({"messages": CONVERSATION, "tools": [TOOL], "add_generation_prompt": True})
    yield _json({"messages": CONVERSATION[:2], "variables": {"enable_thinking": False}})
    yield _json({"messages": CONVERSATION[:3], "continue_final_message": True})
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    yield _json({"messages": CONVERSATION, "template": template})


def bodies() -> Iterator[bytes]:
    more: list[tuple[str, dict[str, Any]]] = [(path, one) for path in VALID for one in VALID[path]]
    hello = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    more += [
        ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "n": 2, "logprobs": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4, "stop": ["b"], "bad_words": ["c"]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logit_bias": {"5": 10}, "seed": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4, "guided_regex": "[ab]{1,3}"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "prompt_logprobs": 1, "echo": True}),
        ("/v1/chat/completions", {**hello, "response_format": named, "stream": True}),
        ("/v1/chat/completions", {**hello, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ]
    for path, body in more:
        if not path.startswith("/admin/"):
            yield path.encode() + b"\n" + _json(body)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def write_seeds(folder: Path, scratch: Path) -> None:
    texts = [text.encode() for _, text, *_ in (*CALLS, *CONTENT)]
    thoughts = ["<think>\nHm.\n</think>\n\nWell.", "Hm.</think>Well.", "[THINK]a[/THINK] b", "none"]
    for name, inputs in (
        ("gguf", gguf_files(scratch)),
        ("safetensors", safetensors_files()),
        ("sentencepiece", sentencepiece_files()),
        ("adapter", adapter_folders()),
        ("adapter_pickle", adapter_pickles()),
        ("tool_calls", texts),
        ("reasoning", [text.encode() for text in thoughts]),
        ("chat_template", chats()),
        ("bodies", bodies()),
        ("codec", messages()),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, data in enumerate(inputs):
            (folder / name / f"seed-{i:02d}").write_bytes(data)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        write_seeds(CORPUS, Path(scratch))
