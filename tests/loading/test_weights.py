"""`iter_weights`: every layout of weight files that published models use, and their failures."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.config.locate import ModelSource
from quire.loading.weights import iter_weights
from quire.protocol.errors import ModelError

TENSORS = {
    "model.embed_tokens.weight": torch.arange(24.0).view(6, 4),
    "model.layers.0.self_attn.q_proj.weight": torch.randn(4, 4).to(torch.bfloat16),
    "model.layers.1.mlp.up_proj.weight": torch.randn(8, 4).to(torch.float16),
    "model.norm.weight": torch.randn(4),
}
SAFETENSORS_INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"


def load(folder: Path, load_format: str = "auto") -> dict[str, Tensor]:
    source = ModelSource(str(folder), "folder", folder)
    pairs = list(iter_weights(source, load_format))
    tensors = dict(pairs)
    assert len(tensors) == len(pairs)
    return tensors


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def split(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    names = list(tensors)
    return [{n: tensors[n] for n in names[:2]}, {n: tensors[n] for n in names[2:]}]


def save_sharded(folder: Path, stem: str, suffix: str, index: str) -> list[Path]:
    """Two shards and their index, named as transformers names them."""
    weight_map, files = {}, []
    for i, part in enumerate(split(TENSORS), 1):
        file = folder / f"{stem}-{i:05d}-of-00002{suffix}"
        if suffix == ".safetensors":
            save_file(part, file)
        else:
            torch.save(part, file)
        weight_map.update(dict.fromkeys(part, file.name))
        files.append(file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def test_single_safetensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), TENSORS)
    assert_same(load(tmp_path, "safetensors"), TENSORS)


def test_sharded_safetensors_beside_bin_shards(tmp_path: Path) -> None:
    """As Llama-2-70b-hf and Mistral-7B-v0.1: both formats, of which safetensors are read."""
    save_sharded(tmp_path, "model", ".safetensors", SAFETENSORS_INDEX)
    for i in (1, 2):
        (tmp_path / f"pytorch_model-0000{i}-of-00002.bin").write_bytes(b"never opened")
    (tmp_path / BIN_INDEX).write_text("never read")
    assert_same(load(tmp_path), TENSORS)


def test_single_bin(tmp_path: Path) -> None:
    """As facebook/opt-125m: one pickle and nothing else; names are left as they are."""
    tensors = {name.replace("model.", "decoder."): tensor for name, tensor in TENSORS.items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "training_args.bin").write_bytes(b"never opened")
    assert_same(load(tmp_path), tensors)


def test_bin_of_old_torch(tmp_path: Path) -> None:
    """Files from before torch 1.6 cannot be memory-mapped but are read."""
    file = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, file, _use_new_zipfile_serialization=False)
    assert_same(load(tmp_path), TENSORS)


def test_sharded_bin_on_request(tmp_path: Path) -> None:
    save_sharded(tmp_path, "pytorch_model", ".bin", BIN_INDEX)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert_same(load(tmp_path, "pt"), TENSORS)


def test_nested_state_dict(tmp_path: Path) -> None:
    torch.save({"state_dict": TENSORS}, tmp_path / "pytorch_model.bin")
    assert_same(load(tmp_path), TENSORS)


def test_index_wins_over_other_files(tmp_path: Path) -> None:
    """A second copy of the weights is not read: neither a single file nor a consolidated one."""
    save_sharded(tmp_path, "model", ".safetensors", SAFETENSORS_INDEX)
    wrong = {name: tensor + 1 for name, tensor in TENSORS.items()}
    save_file(wrong, tmp_path / "model.safetensors")
    save_file(wrong, tmp_path / "consolidated.safetensors")
    assert_same(load(tmp_path), TENSORS)


def test_index_says_which_copy_of_a_tensor_counts(tmp_path: Path) -> None:
    first, second = split(TENSORS)
    stale = {name: tensor + 1 for name, tensor in second.items()}
    save_file({**first, **stale}, tmp_path / "a.safetensors")
    save_file(second, tmp_path / "b.safetensors")
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (tmp_path / SAFETENSORS_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load(tmp_path), TENSORS)


def test_shards_without_an_index(tmp_path: Path) -> None:
    files = save_sharded(tmp_path, "model", ".safetensors", SAFETENSORS_INDEX)
    (tmp_path / SAFETENSORS_INDEX).unlink()
    save_file({"x": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert_same(load(tmp_path), TENSORS)
    files[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(tmp_path)


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    """Without an index it is unknown which of two copies is meant."""
    save_file(TENSORS, tmp_path / "a.safetensors")
    save_file(TENSORS, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"model\.\S+ is in both .*a\.safetensors and"):
        load(tmp_path)


def test_dummy_reads_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, "dummy") == {}


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
@pytest.mark.parametrize("sharded", [True, False])
def test_truncated_safetensors(tmp_path: Path, keep: int, sharded: bool) -> None:
    """Found, with the file's name, before the first tensor is given out."""
    if sharded:
        file = save_sharded(tmp_path, "model", ".safetensors", SAFETENSORS_INDEX)[1]
    else:
        file = tmp_path / "model.safetensors"
        save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=f"{file}.*damaged.*download"):
        iter_weights(ModelSource("m", "folder", tmp_path))


def test_safetensors_with_a_mad_header(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for junk in (struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"[]", b"\xff" * 64):
        file.write_bytes(junk)
        with pytest.raises(ModelError, match="damaged"):
            load(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_missing_shard(tmp_path: Path, suffix: str) -> None:
    stem, index = (
        ("model", SAFETENSORS_INDEX) if suffix == ".safetensors" else ("pytorch_model", BIN_INDEX)
    )
    save_sharded(tmp_path, stem, suffix, index)[1].unlink()
    message = f"{stem}-00002-of-00002{suffix} is missing .1 of 2 shards.*download"
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_tensor_missing_from_its_shard(tmp_path: Path, suffix: str) -> None:
    stem, index = (
        ("model", SAFETENSORS_INDEX) if suffix == ".safetensors" else ("pytorch_model", BIN_INDEX)
    )
    save_sharded(tmp_path, stem, suffix, index)
    content = json.loads((tmp_path / index).read_text())
    content["weight_map"]["lm_head.weight"] = f"{stem}-00001-of-00002{suffix}"
    (tmp_path / index).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"00001-of-00002\S+ tensor lm_head\.weight is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": ["x"]}',
        '{"weight_map": {"x": 3}}',
        '{"weight_map": {"x": "../../secret.safetensors"}}',
        '{"weight_map": {"x": "/etc/passwd"}}',
    ],
)
def test_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / SAFETENSORS_INDEX).write_text(content)
    with pytest.raises(ModelError, match=f"{SAFETENSORS_INDEX}.*download"):
        load(tmp_path)


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "pt"])
def test_folder_without_weights(tmp_path: Path, load_format: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no weights.*config\.json.*publisher's own") as caught:
        load(tmp_path, load_format)
    assert str(tmp_path) in str(caught.value)


class Payload:
    """Unpickling this would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("new_format", [True, False])
def test_pickled_code_is_refused_and_not_run(tmp_path: Path, new_format: bool) -> None:
    target = tmp_path / "created"
    file = tmp_path / "pytorch_model.bin"
    weights = {**TENSORS, "evil": Payload(target)}
    torch.save(weights, file, _use_new_zipfile_serialization=new_format)
    with pytest.raises(ModelError, match=f"{file} was refused.*mkdir.*safetensors"):
        load(tmp_path)
    assert not target.exists()


def test_damaged_pickles(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, file)
    whole = file.read_bytes()
    for content in (b"", b"garbage", whole[: len(whole) // 2], whole[:-30]):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=f"{file} is damaged.*download"):
            load(tmp_path)


@pytest.mark.parametrize("content", [[1, 2], {}, {"step": 3}, {1: torch.zeros(1)}])
def test_pickles_of_something_else(tmp_path: Path, content: object) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(content, file)
    with pytest.raises(ModelError, match=f"{file}.*must"):
        load(tmp_path)
    file.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ModelError, match=str(file)):
        load(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of mappings")
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_tensors_are_mapped_not_read(tmp_path: Path, suffix: str) -> None:
    """Loading a model larger than memory must not copy its files: the pages stay the file's."""
    large = {"x": torch.zeros(1 << 20), "y": torch.ones(1 << 20)}
    if suffix == ".bin":
        torch.save(large, tmp_path / "pytorch_model.bin")
    else:
        save_file(large, tmp_path / "model.safetensors")
    for _, tensor in iter_weights(ModelSource("m", "folder", tmp_path)):
        address = tensor.data_ptr()
        assert any(
            int(low, 16) <= address < int(high, 16) and str(tmp_path) in line
            for line in Path("/proc/self/maps").read_text().splitlines()
            for low, high in [line.split()[0].split("-")]
        )
