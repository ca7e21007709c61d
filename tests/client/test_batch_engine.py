"""`quire run-batch` without a server: the engine runs in the command's own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli import main
from tests.tiny import ascii_tokenizer, greedy, save_tiny, text_ids

pytest.importorskip("fastapi")

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_answers_are_those_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts are transformers' greedy ones; what the server would refuse is refused alone."""
    model = save_tiny(tmp_path / "model", tokenizer_config={"chat_template": TEMPLATE})
    prompts = ["the quick brown fox", "one two three"]
    texts = [
        ascii_tokenizer().decode(ids)
        for prompt in prompts
        for ids in greedy(model, [text_ids(prompt)], 6)
    ]
    same: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    messages = [{"role": "user", "content": prompts[1]}]
    bodies = {
        "completion": ("/v1/completions", {"prompt": prompts[0], **same}),
        "chat": ("/v1/chat/completions", {"messages": messages, **same}),
        "embedding": ("/v1/embeddings", {"input": prompts[0], "pooling": "mean"}),
        "refused": ("/v1/completions", {"prompt": "x", "temperature": -1}),
    }
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
        for name, (url, body) in bodies.items()
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    flags = ["--model", str(tmp_path / "model"), "--kv-cache-memory-bytes", "8MiB"]
    assert main(["run-batch", "-i", str(source), "-o", str(target), *flags]) == 1
    results = {
        result["custom_id"]: result["response"]
        for result in map(json.loads, target.read_text().splitlines())
    }
    assert results["completion"]["body"]["choices"][0]["text"] == texts[0]
    assert results["chat"]["body"]["choices"][0]["message"]["content"] == texts[1]
    with torch.no_grad():
        states = model.base_model(torch.tensor([text_ids(prompts[0])])).last_hidden_state[0]
    vector = torch.nn.functional.normalize(states.mean(0), dim=0).tolist()
    (embedding,) = results["embedding"]["body"]["data"]
    assert embedding["embedding"] == pytest.approx(vector, abs=2e-5)
    assert results["completion"]["request_id"]
    assert results["refused"]["status_code"] == 400
    assert "temperature" in results["refused"]["body"]["error"]["message"]
    assert "3 completed, 1 failed" in capsys.readouterr().err
