"""Model folders from elsewhere: each fault is a `ModelError` that names file and field.

They run in a process of their own, since some of them would end it, and each has a few seconds: the
sizes in them would otherwise take minutes or all memory.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.conftest import Tiny

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "head_dim",
)
BAD_SIZES: list[Any] = [10**9, 2**63, 2**31, 10**400, -1, 0, 1.5, float("nan"), True, "x", [1], {}]
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


def bpe(**changes: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2, "b": 3}, "merges": [["a", "é"]]}
    return {"model": {**model, **changes}}


def normalizer(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def template(*single: dict[str, Any]) -> dict[str, Any]:
    parts = {"type": "TemplateProcessing", "single": list(single), "pair": []}
    return {"post_processor": {**parts, "special_tokens": {}}}


CHARSMAP = base64.b64encode(b"\xff" * 100).decode()
# File, what it holds instead (a dictionary changes keys), and what else the error must name.
CASES: list[tuple[str, Any, str]] = [
    *(("config.json", {key: value}, key) for key in SIZES for value in BAD_SIZES),
    ("config.json", {"num_hidden_layers": 4000, "hidden_size": 4096}, "num_layers=4000"),
    ("config.json", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ("config.json", {"rope_parameters": {"rope_type": "linear", "factor": 1e300}}, "factor"),
    ("config.json", {"rope_parameters": {"rope_type": "linear", "factor": 10**400}}, "factor"),
    ("config.json", DEEP, "nested too deeply"),
    ("config.json", "[" * 100_000, "nested too deeply"),
    ("config.json", '{"a": ' + "9" * 1_000_000 + "}", "digits"),
    ("generation_config.json", DEEP, "nested too deeply"),
    ("tokenizer_config.json", DEEP, "nested too deeply"),
    ("chat_template.jinja", b"\xff\xfe", "cannot be read as text"),
    ("model.safetensors.index.json", DEEP, "nested too deeply"),
    ("model.safetensors.index.json", {"weight_map": {"a": "/etc/passwd"}}, "weight_map['a']"),
    ("model.safetensors", b"\xff" * 16, "damaged"),
    ("tokenizer.json", "{" * 100_000, "cannot be read as a tokenizer"),
    ("tokenizer.json", DEEP, "cannot be read as a tokenizer"),
    # These abort the process, or panic, in the tokenizers library.
    ("tokenizer.json", bpe(continuing_subword_prefix="a"), "continuing_subword_prefix ('a')"),
    ("tokenizer.json", bpe(continuing_subword_prefix="zzz"), "continuing_subword_prefix ('zzz')"),
    ("tokenizer.json", normalizer({"type": "Precompiled", "precompiled_charsmap": CHARSMAP}), ""),
    ("tokenizer.json", normalizer(replace("", "y")), "index out of bounds"),
    ("tokenizer.json", template({"SpecialToken": {"id": "[Z]", "type_id": 0}}), "no entry found"),
    ("tokenizer.json", template({"Sequence": {"id": "B", "type_id": 0}}), "out of bounds"),
    # These would not end.
    ("tokenizer.json", normalizer(*[replace("a", "a" * 10)] * 12), "normalizer makes texts"),
    ("tokenizer.json", normalizer(*[{"type": "NFC"}] * 200_000), "normalizer has 200001 parts"),
]

PROGRAM = """
import faulthandler, json, sys
from quire import LLM, ModelError
for folder in sys.stdin.read().splitlines():
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        LLM(folder, num_threads=1, kv_cache_memory_bytes="1MiB").shutdown()
        print(json.dumps("it was loaded"), flush=True)
    except ModelError as error:
        print(json.dumps(str(error)), flush=True)
    except BaseException as error:
        print(json.dumps(f"no ModelError: {error!r}"), flush=True)
"""


def write_case(base: Path, folder: Path, name: str, content: Any) -> None:
    shutil.copytree(base, folder)
    path = folder / name
    if isinstance(content, dict):
        known = json.loads(path.read_text()) if path.exists() else {}
        content = json.dumps({**known, **content})
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def test_each_fault_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folders = [tmp_path / str(i) for i in range(len(CASES))]
    for folder, (name, content, _) in zip(folders, CASES, strict=True):
        write_case(tiny.folder, folder, name, content)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(map(str, folders)),
        capture_output=True,
        text=True,
        timeout=280,
    )
    messages = [json.loads(line) for line in result.stdout.splitlines()]
    wrong = []
    for (name, content, named), message in zip(CASES, messages, strict=False):
        # A shape that fits no weights is named by the fields of `ModelConfig`.
        if name not in message or (named not in message and "describes a model of" not in message):
            wrong.append(f"{name} with {str(content)[:80]}: {message[:300]}")
    assert not wrong, "\n".join(wrong)
    assert len(messages) == len(CASES), f"{CASES[len(messages)]} ended it: {result.stderr[-2000:]}"


@pytest.mark.slow
def test_a_server_says_so_too(tiny: Tiny, tmp_path: Path) -> None:
    for i, (name, content, named) in enumerate(
        [
            ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
            ("config.json", {"hidden_size": 2**63}, "hidden_size"),
            ("tokenizer.json", bpe(continuing_subword_prefix="a"), "continuing_subword_prefix"),
        ]
    ):
        folder = tmp_path / str(i)
        write_case(tiny.folder, folder, name, content)
        words = ["serve", "--model", str(folder), "--port", "0", "--num-threads", "1"]
        result = subprocess.run(
            [sys.executable, "-m", "quire", *words], capture_output=True, text=True, timeout=120
        )
        assert result.returncode != 0
        assert name in result.stderr and named in result.stderr.splitlines()[-1], result.stderr
        assert "Traceback" not in result.stderr
