"""Adapters from elsewhere: each fault is an `AdapterError` that names file, and tensor or field,
found by headers alone."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from quire.files.adapter import read_adapter
from quire.protocol.errors import AdapterError

Q = "base_model.model.model.layers.0.self_attn.q_proj"
E = "base_model.model.model.layers.0.mlp.experts"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
}


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


PAIR = {f"{Q}.lora_A.weight": numbers(4, 6), f"{Q}.lora_B.weight": numbers(5, 4)}
EXPERTS = {
    f"{E}.base_layer.lora_A.weight": numbers(12, 6),
    f"{E}.base_layer.lora_B.weight": numbers(10, 12),
    f"{E}.lora_A.weight": numbers(12, 5),
    f"{E}.lora_B.weight": numbers(6, 12),
}
BOTH = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def write(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    return folder


def refusal(folder: Path) -> str:
    """What is said of a folder, which must take little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(AdapterError) as caught:
            read_adapter(folder, "one")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert len(message) < 1500
    return message


def test_a_sound_one_is_read(tmp_path: Path) -> None:
    """The faults below are the only ones of their folders."""
    file = read_adapter(write(tmp_path, {**PAIR, **EXPERTS}, **BOTH), "one")
    assert len(file.modules) == 1 + 3 * 3
    assert file.rank == 4
    assert file.nbytes == 4 * (24 + 20 + 72 + 120 + 60 + 72)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, 'peft_type must be "LORA"'),
        ({"peft_type": None}, "peft_type must be set"),
        ({"r": 10**6}, "r must be at most"),
        ({"r": -1}, "r must be a positive integer"),
        ({"r": "x" * 10**6}, "r must be a positive integer"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number between"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a number between"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number between"),
        ({"lora_alpha": [8]}, "lora_alpha must be a number"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"use_dora": True}, "use_dora is true"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"q_proj": "8"}}, r"alpha_pattern\[q_proj\] must be a number"),
        ({"alpha_pattern": {"(": 8}}, r"alpha_pattern: '\(' is no regular expression"),
        ({"alpha_pattern": dict.fromkeys(map(str, range(20_000)), 8)}, "20000 entries"),
        ({"target_parameters": "experts"}, "target_parameters must be a list"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"layer_replication": [[0, 4]]}, "layer_replication is"),
        ({"use_qalora": True}, "use_qalora is"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base's weights before training"),
    ],
)
def test_configurations(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, PAIR, **config))
    assert re.search(words, message), message
    assert "adapter_config.json" in message


def test_a_pattern_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.files.patterns.TIMEOUT_S", 1.0)
    slow = {r"((\w|\.)+)+x": 8}
    message = refusal(write(tmp_path, PAIR, alpha_pattern=slow))
    assert "alpha_pattern: its regular expressions took more than" in message


@pytest.mark.parametrize("text", [DEEP, "[1]", "{", b"\xff\xfe", '{"a": ' + "9" * 10**6 + "}"])
def test_configurations_that_are_none(text: str | bytes, tmp_path: Path) -> None:
    file = write(tmp_path, PAIR) / "adapter_config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert str(file) in refusal(tmp_path)


def changed(**tensors: np.ndarray | None) -> dict[str, np.ndarray]:
    every = {**PAIR, **{f"{Q}.{name}": tensor for name, tensor in tensors.items()}}
    return {name: tensor for name, tensor in every.items() if tensor is not None}


TENSORS: list[tuple[dict[str, np.ndarray], str]] = [
    (changed(**{"lora_B.weight": None}), "lora_A.weight .* there is no B"),
    (changed(**{"lora_A.weight": None}), "lora_B.weight .* there is no A"),
    (changed(**{"lora_B.weight": numbers(5, 3)}), "lora_B.weight .* must have 4 columns"),
    (changed(**{"lora_B.weight": numbers(5, 4, 1)}), "lora_B.weight .* two dimensions"),
    (changed(**{"lora_A.weight": numbers(0, 6), "lora_B.weight": numbers(5, 0)}), "lora_A.* rank"),
    (changed(**{"lora_A.weight": numbers(10**6, 1), "lora_B.weight": numbers(1, 10**6)}), "rank"),
    (changed(**{"lora_A.weight": numbers(4, 6, dtype="int32")}), "must be F32, F16 or BF16"),
    (changed(**{"lora_A.weight": numbers(4, 6, dtype="float64")}), "must be F32, F16 or BF16"),
    (changed(**{"lora_A.weight": numbers(4, 6, dtype="complex64")}), "is of type C64"),
    (changed(**{"lora_magnitude_vector": numbers(5)}), "use_dora is false"),
    (changed(**{"lora_B.bias": numbers(6)}), r"lora_B.bias .* shape \[5\]"),
    (changed(**{"weight": numbers(5, 6)}), "has A and B as well"),
    (changed(**{"lora_E": numbers(4, 1)}), "lora_E is not understood"),
    (changed(**{"../../etc/passwd.lora_A.weight": numbers(4, 6)}), "passwd.* is not understood"),
    (changed(**{"lora_A.other.weight": numbers(4, 6)}), "lora_A.other.weight is not understood"),
    (changed(**{"x" * 10**6 + ".lora_A.weight": numbers(4, 6)}), "xxx... is not understood"),
    (changed(**{"token_adapter.weight": numbers(4, 6)}), "token_adapter.weight is not understood"),
    (changed(**{f"lora_{i}": numbers(1) for i in range(99)}), "91 more are not understood"),
    ({f"{Q}.base_layer.weight": numbers(4, 6)}, "no A and B beside it"),
    ({f"{Q}.lora_magnitude_vector": numbers(4)}, "no A and B beside it"),
]


@pytest.mark.parametrize(("tensors", "words"), TENSORS)
def test_tensors(tensors: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, tensors))
    assert re.search(words, message), message
    assert "adapter_model.safetensors" in message


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (
            {f"{E}.lora_A.weight": numbers(13, 5), f"{E}.lora_B.weight": numbers(6, 13)},
            BOTH,
            "the rank of .*down_proj is 4",
        ),
        ({f"{E}.lora_A.weight": numbers(16, 5)}, BOTH, "must have 16 columns"),
        ({}, {**BOTH, "rank_pattern": {"experts.down_proj": 2}}, "'down_proj': 6} experts"),
        ({}, {**BOTH, "rank_pattern": {"experts.down_proj": 0.5}}, "rank .* is 0.5"),
        ({}, {"target_parameters": ["experts.down_proj"]}, "names 1 of .* the file has 2"),
        ({f"{E}.lora_A.weight": numbers(12, 4)}, BOTH, "not those of a gate_up_proj"),
        ({f"{E}.lora_B.bias": numbers(6)}, BOTH, "have A and B alone"),
    ],
)
def test_experts(
    tensors: dict[str, np.ndarray], config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    message = refusal(write(tmp_path, {**EXPERTS, **tensors}, **config))
    assert re.search(words, message), message


def header(entries: object, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


A = f"{Q}.lora_A.weight"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it has 0 bytes"),
        (b"\xff" * 16, "its header has 18446744073709551615 bytes"),
        (header(b"[1]"), "no JSON object"),
        (header(b"{"), "is no JSON"),
        (header(DEEP.encode()), "is no JSON"),
        (header({}), "holds 0 tensors"),
        (header(b"[" + b"1," * 10**7 + b"1]"), "its header has more than tensors"),
        (header({A: 1}), "has no type, shape and place"),
        (header({A: entry([4, 6], 0, 96)}), "tells of"),
        (header({A: entry([4, 6], 0, 95)}, bytes(95)), "in 95 bytes"),
        (header({A: entry([10**6, 10**6], 0, 4 * 10**12)}), "tells of"),
        (header({A: entry([-4, -6], 0, 96)}, bytes(96)), "impossible numbers"),
        (header({A: entry([1] * 10**5, 0, 4)}, bytes(4)), "impossible numbers"),
        (header({A: entry([2**61] * 8, 0, 4)}, bytes(4)), "in 4 bytes"),
        (header({A: entry(["4"], 0, 16)}, bytes(16)), "impossible numbers"),
        (header({A: entry([4], 0, 16), f"{A}x": entry([4], 0, 16)}, bytes(16)), "does not begin"),
        (header({A: entry([4], 4, 20)}, bytes(20)), "does not begin"),
        (header({A: entry([4], 0, 16, "F4")}, bytes(16)), "is of type F4"),
        (header({A: entry([4], 0, 16, ["F4"])}, bytes(16)), "is of type"),  # type: ignore[arg-type]
        (header({f"{i}": entry([0], 0, 0) for i in range(300_000)}), "holds 300000 tensors"),
    ],
)
def test_files(content: bytes, words: str, tmp_path: Path) -> None:
    (write(tmp_path, PAIR) / "adapter_model.safetensors").write_bytes(content)
    message = refusal(tmp_path)
    assert words in message, message
    assert "adapter_model.safetensors" in message


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_what_is_no_regular_file(name: str, tmp_path: Path) -> None:
    """A pipe would make its reader wait, and a device never end."""
    file = write(tmp_path, PAIR) / name
    file.unlink()
    os.mkfifo(file)
    assert name in refusal(tmp_path)
    file.unlink()
    file.symlink_to("/dev/zero")
    assert name in refusal(tmp_path)
    file.unlink()
    assert name in refusal(tmp_path)


def test_folders(tmp_path: Path) -> None:
    assert "is not a folder" in refusal(tmp_path / "none")
    assert "adapter_config.json is missing" in refusal(tmp_path)
    with pytest.raises(AdapterError, match="is not a folder"):
        read_adapter("\0", "one")


class Calls:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/never",)


def pickled(content: bytes, compress: int = zipfile.ZIP_STORED) -> bytes:
    """What torch.save would have written around a pickle."""
    room = io.BytesIO()
    with zipfile.ZipFile(room, "w", compress) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", bytes(96))
    return room.getvalue()


class _Tensor:
    """Pickled as torch does."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> None:
        self.arguments = (offset, shape, stride)


class _Pickler(pickle.Pickler):
    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, _Tensor):
            import torch

            return torch._utils._rebuild_tensor_v2, (_Storage(), *found.arguments, False, {})
        return NotImplemented

    def persistent_id(self, found: Any) -> Any:
        import torch

        if isinstance(found, _Storage):
            return ("storage", torch.FloatStorage, "0", "cpu", 24)
        return None


class _Storage:
    pass


def described(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, count: int = 1
) -> bytes:
    """`count` tensors with the same numbers."""
    tensor, room = _Tensor(shape, stride, offset), io.BytesIO()
    _Pickler(room, 2).dump({A: tensor} | {f"{i}": tensor for i in range(1, count)})
    return room.getvalue()


PICKLES: list[tuple[bytes, str]] = [
    (b"", "no file of torch.save"),
    (pickle.dumps({"a": 1}), "no file of torch.save"),
    (pickled(pickle.dumps(Calls())), r"would run code on loading \((posix|nt).system\)"),
    (pickled(pickle.dumps([1])), "must hold a dictionary of tensors, got list"),
    (pickled(pickle.dumps({"a": 1})), "entry a must be a tensor, got int"),
    (pickled(b"\x80\x02}r\xff\xff\xff\x7f."), "numbers more objects than it has"),
    (pickled(b"\x80\x02}"), "pickle cannot be read"),
    (pickled(b"cbuiltins\neval\n."), "would run code on loading"),
    (pickled(described((4, 6), (6, 1)), zipfile.ZIP_DEFLATED), "is compressed"),
    (pickled(described((6, 4), (1, 6))), "is a view of another one"),
    (pickled(described((4, 7), (7, 1))), "reaches beyond its numbers"),
    (pickled(described((4, 6), (6, 1), 1)), "reaches beyond its numbers"),
    (pickled(described((4, -6), (6, 1))), "pickle cannot be read"),
    (pickled(described((4, 6), (6, 1))), "there is no B beside it"),
    (pickled(described((4, 6), (6, 1), count=9999)), "its tensors have 959904 bytes, the file"),
]


@pytest.mark.parametrize(("content", "words"), PICKLES)
def test_pickles(content: bytes, words: str, tmp_path: Path) -> None:
    """Nothing that a pickle says is run."""
    (write(tmp_path, PAIR) / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(content)
    message = refusal(tmp_path)
    assert re.search(words, message), message
    assert "adapter_model.bin" in message
    assert not Path("/tmp/never").exists()
