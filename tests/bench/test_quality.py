"""`quire quality`: its figures are those of transformers, and its status says what it was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quire.cli import main
from tests.models.reference import random_model, save_safetensors
from tests.tiny import MAX_LEN, logprobs, save_tiny, save_tokenizer, text_ids

ENGINE = ["--num-threads", "1", "--kv-cache-memory-bytes", "32MiB", "--quiet"]
PROMPTS = [
    "The sea was calm, and the ship lay in the harbour until the morning.",
    "def double(x): return 2 * x",
    "Numbers: 1, 2, 3, 5, 8, 13, 21, 34, 55, 89.",
]


def disturb(model: PreTrainedModel, share: float) -> None:
    """Change all weights a little, as rounding does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter *= 1 + share * noise


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folders of a base and a model, transformers' models of them, and a file of prompts."""
    folder = tmp_path_factory.mktemp("pair")
    base = save_tiny(folder / "base")
    model = save_tiny(folder / "model")
    disturb(model, 0.05)
    save_safetensors(model, folder / "model")
    lines = [json.dumps({"prompt": PROMPTS[0]}), json.dumps(PROMPTS[1]), ""]
    lines.append(json.dumps({"text": PROMPTS[2]}))
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {"folder": folder, "base": base, "model": model}


def quality(pair: dict[str, Any], *words: str) -> int:
    folder = pair["folder"]
    return main(["quality", str(folder / "model"), "--against", str(folder / "base"), *words])


def test_figures_are_those_of_transformers(
    pair: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With prompts that are computed in several steps."""
    prompts, out, plot = pair["folder"] / "prompts.jsonl", tmp_path / "o.json", tmp_path / "o.svg"
    words = ["--prompts", str(prompts), "--json", str(out), "--plot", str(plot), *ENGINE]
    assert quality(pair, *words, "--max-num-batched-tokens", "7", "--max-num-seqs", "1") == 0
    kl, losses, base_losses, same = [], [], [], []
    for prompt in PROMPTS:
        ids = text_ids(prompt)
        targets = torch.tensor(ids[1:])[:, None]
        base, model = (logprobs(pair[name], ids)[:-1] for name in ("base", "model"))
        kl.append((base.exp() * (base - model)).sum(-1))
        base_losses.append(-base.gather(1, targets)[:, 0])
        losses.append(-model.gather(1, targets)[:, 0])
        same.append(base.argmax(-1) == model.argmax(-1))
    every = torch.cat(kl)
    found = json.loads(out.read_text())
    assert found["tokens"] == len(every) and found["texts"] == 3
    assert found["kl"] == pytest.approx(every.tolist(), rel=0.01, abs=1e-5)
    assert found["kl_mean"] == pytest.approx(float(every.mean()), rel=0.005)
    assert found["kl_p99"] == pytest.approx(float(every.quantile(0.99)), rel=0.01)
    assert found["perplexity"] == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)
    expected = float(torch.cat(base_losses).mean().exp())
    assert found["base_perplexity"] == pytest.approx(expected, rel=1e-4)
    assert found["same_top1"] == pytest.approx(float(torch.cat(same).double().mean()))
    assert found["kl_mean"] > 0.001 and found["same_top1"] < 1
    worst = found["differ_most"][0]
    place = int(every.argmax())
    number = next(i for i in range(3) if place < sum(len(one) for one in kl[: i + 1]))
    position = place - sum(len(one) for one in kl[:number]) + 1
    assert (worst["text"], worst["position"]) == (number, position)
    assert PROMPTS[number].startswith(worst["before"] + worst["token"]) or position > 12
    printed = capsys.readouterr().out
    assert f"{found['perplexity']:.4f}" in printed and f"{found['kl_mean']:.5f}" in printed
    assert plot.stat().st_size > 1000


def test_status_follows_max_kl(pair: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """With the built-in text."""
    words = ["--tokens", "100", "--window", "50", *ENGINE]
    assert quality(pair, *words, "--max-kl", "100") == 0
    assert quality(pair, *words, "--max-kl", "1e-6") == 1
    assert "is not within --max-kl 1e-06" in capsys.readouterr().err


def test_a_divergence_that_is_no_number_is_beyond_any_bound(
    pair: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = save_tiny(tmp_path)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    save_safetensors(broken, tmp_path)
    words = ["--against", str(pair["folder"] / "base"), "--tokens", "50", "--max-kl", "100"]
    assert main(["quality", str(tmp_path), *words, *ENGINE]) == 1
    assert "the mean divergence, nan, is not within" in capsys.readouterr().err


def test_a_model_against_itself(
    pair: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --against the base is MODEL, and only the flags for one of them differ."""
    words = ["quality", str(pair["folder"] / "base"), "--tokens", "100", "--window", "50", *ENGINE]
    out = ["--json", str(tmp_path / "out.json")]
    assert main([*words, "--dtype", "float32", "--max-kl", "1e-5"]) == 0
    printed = capsys.readouterr().out
    assert "same most likely token          100.0 %" in printed
    assert main([*words, "--max-kl", "1e-5"]) == 2, "a limit that is always kept"
    assert "the base is the model itself" in capsys.readouterr().err
    assert main([*words, "--quantization", "int8", *out]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["model"]["quantization"] == "int8" and found["base"]["quantization"] is None
    assert 1e-5 < found["kl_mean"] < 0.1
    assert main([*words, "--against-quantization", "int8", *out]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["model"]["quantization"] is None and found["base"]["quantization"] == "int8"


def test_mistakes(pair: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(message: str, *words: str) -> None:
        assert quality(pair, *words, *ENGINE) == 2
        assert message in capsys.readouterr().err

    refused("--window 4096 is too long", "--window", "4096")
    refused(f"use at most {MAX_LEN - 1}", "--window", str(MAX_LEN))
    refused("--tokens must be at least 2, got 1", "--tokens", "1")
    refused("cannot be read (No such file", "--prompts", "none.txt")
    empty, bad = tmp_path / "empty.txt", tmp_path / "bad.jsonl"
    empty.write_text(" ")
    bad.write_text('{"prompt": "fine"}\n{"question": "?"}\n')
    refused("has no text of at least two tokens", "--prompts", str(empty))
    refused("line 2 must be a text or", "--prompts", str(bad))
    bad.write_text("{")
    refused("line 1 is not JSON", "--prompts", str(bad))
    other = tmp_path / "other"
    save_safetensors(random_model("llama", vocab_size=200), other)
    save_tokenizer(other)
    refused("has 160 tokens and", "--against", str(other))
    save_tiny(tmp_path / "lower")
    path = tmp_path / "lower" / "tokenizer.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "Lowercase"}})
    )
    refused("make different tokens", "--against", str(tmp_path / "lower"))
