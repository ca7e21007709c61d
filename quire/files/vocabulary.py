"""The tokens that a model's files name, to see whether two models mean the same by a token id."""

from __future__ import annotations

from pathlib import Path

from quire.files.gguf import GGUFFile
from quire.files.json_file import read_json_object


def read_vocabulary(path: Path) -> dict[int, str]:
    """Token id -> token, of a folder with a tokenizer.json or of a .gguf file; empty where neither
    tells."""
    if path.is_file():
        return dict(enumerate(GGUFFile(path).metadata.get("tokenizer.ggml.tokens", ())))
    if not (path / "tokenizer.json").is_file():
        return {}
    content = read_json_object(path / "tokenizer.json")
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            found = {index: token for token, index in vocabulary.items()}
        else:  # with scores
            found = {index: entry[0] for index, entry in enumerate(vocabulary)}
        return found | {one["id"]: one["content"] for one in content.get("added_tokens") or ()}
    except (KeyError, IndexError, TypeError):
        return {}
