"""The embedded model, a GGUF file, as a quantised folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.bench.sample_text import SAMPLE_TEXT
from quire.cli import main
from quire.config.embedded import embedded_model_path
from quire.config.locate import locate_model
from quire.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow


def test_eight_bits_are_nearly_free(tmp_path: Path) -> None:
    """Quire and transformers read the folder; its tokenizer is that of the file; predictions are
    near those of the exact numbers."""
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    assert main(["quantize", str(out), "--method", "w8a8"]) == 0
    words = ["quality", str(out), "--against", str(embedded_model_path())]
    words += ["--against-dtype", "float32", "--tokens", "512", "--json", str(figures)]
    assert main([*words, "--max-kl", "0.05"]) == 0
    found = json.loads(figures.read_text())
    assert found["perplexity"] == pytest.approx(found["base_perplexity"], rel=0.03)
    assert found["same_top1"] > 0.85
    mine, theirs = load_tokenizer(locate_model(None)), AutoTokenizer.from_pretrained(out)
    ids = mine.encode(SAMPLE_TEXT)
    assert theirs(SAMPLE_TEXT).input_ids == load_tokenizer(locate_model(out)).encode(SAMPLE_TEXT)
    assert theirs(SAMPLE_TEXT).input_ids == ids
    messages = [{"role": "user", "content": "Hi"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False)
    assert rendered == mine.apply_chat_template(messages, tokenize=False)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids[:512]])).logits[0, :-1].log_softmax(-1)
    losses = -logprobs.gather(1, torch.tensor(ids[1:512])[:, None])
    assert float(losses.mean().exp()) == pytest.approx(found["perplexity"], rel=0.02)
