"""Files of texts become windows of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from quire.config.locate import locate_model
from quire.protocol.errors import OptionError
from quire.text.prompts import Windows, cut_text, read_windows
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import END, END_ID, save_tokenizer, text_ids

TEXT = " ".join(f"Line {number} says that nothing happened." for number in range(40))


def tokenizer(folder: Path, **config: Any) -> Tokenizer:
    save_tokenizer(folder, **config)
    (folder / "config.json").write_text("{}")
    return load_tokenizer(locate_model(folder, load_format="dummy"))


def read(path: Path, made: Tokenizer, size: int = 8, limit: int = 40) -> Windows:
    return read_windows(path, "--prompts", made, size, limit)


def test_windows_are_spread_over_a_text(tmp_path: Path) -> None:
    ids, made = text_ids(TEXT), tokenizer(tmp_path)
    windows = cut_text(TEXT, made, 10, 45)
    available = len(ids) // 10
    assert windows == [ids[10 * place :][:10] for place in (available * i // 4 for i in range(4))]
    assert cut_text(TEXT, made, 10, 10**6) == [ids[10 * i :][:10] for i in range(available)]
    assert cut_text(TEXT, made, 10**6, 10**6) == [ids]
    assert cut_text("", made, 10, 100) == []


def test_a_window_begins_as_a_text_does(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, bos_token=END)
    made.backend.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, END_ID)]
    )
    windows = cut_text(TEXT, made, 10, 30)
    assert len(windows) == 3 and {len(one) for one in windows} == {10}
    assert all(one[0] == END_ID for one in windows) and windows[0][1:] == text_ids(TEXT)[:9]


def test_lines_of_json_are_prompts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    made, path = tokenizer(tmp_path, chat_template=template), tmp_path / "prompts.jsonl"
    entries: list[Any] = [
        {"prompt": "a first prompt that is longer than a window", "id": 7},
        "another\u2028one",
        {"text": "third"},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    path.write_text(
        "\n\n".join(json.dumps(one, ensure_ascii=False) for one in entries), encoding="utf-8"
    )
    texts = [entries[0]["prompt"], entries[1], "third", "user: Hi\n"]
    assert read(path, made) == [text_ids(text)[:8] for text in texts]
    first = text_ids(texts[0])
    assert read(path, made, 8, 10) == [first[:8], text_ids(texts[1])[:2]]
    assert read(path, made, 8, 9) == [first[:8]]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    made, path = tokenizer(tmp_path), tmp_path / "prompts.txt"
    path.write_bytes(b"\xff\xfe\x00")
    for name, message in (("prompts.txt", "cannot be read"), ("none.txt", "No such file")):
        with pytest.raises(OptionError, match=f"--prompts .*{name}.*{message}"):
            read(tmp_path / name, made)
