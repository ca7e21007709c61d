"""Adapters that peft wrote, next to what peft makes of them."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.files import adapter
from quire.files.adapter import read_adapter
from quire.loading.adapters import LoraWeights, load_adapter
from quire.protocol.errors import AdapterError
from tests.adapters import ATTENTION, LAYOUTS, MLP, make_adapter, unfuse_experts
from tests.models.reference import random_model


def states(layout: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a base, and with an adapter merged by peft, which `folder` then has."""
    family, config = LAYOUTS[layout]
    base = random_model(family)
    model = make_adapter(base, folder, **config)
    return base.state_dict(), model.merge_and_unload().state_dict()


def module_weight(state: dict[str, Tensor], path: str) -> Tensor:
    """[outputs, inputs], by the path of an adapter's module."""
    expert = re.fullmatch(r"(.+)\.mlp\.experts\.(\d+)\.(\w+)", path)
    if expert is None:
        weight = state[f"{path}.weight"]
        return weight.mT if re.search(r"\.c_(attn|proj|fc)$", path) else weight
    parent, index, own = expert[1], int(expert[2]), expert[3]
    own_name = "down_proj" if own == "down_proj" else "gate_up_proj"
    name = next(
        n for n in state if n.startswith(f"{parent}.") and n.endswith(f"experts.{own_name}")
    )
    weight = state[name][index]
    alternates = f"{name}_bias" in state  # gpt-oss
    weight = weight.mT if alternates else weight
    if own == "down_proj":
        return weight
    half = 0 if own == "gate_proj" else 1
    return weight[half::2] if alternates else weight.chunk(2)[half]


def change(weights: LoraWeights, is_embedding: bool) -> Tensor:
    assert weights.a is not None and weights.b is not None
    made = weights.scaling * (weights.b @ weights.a)
    return made.mT if is_embedding else made


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "dora" not in name])
def test_all_changes_are_those_of_peft(layout: str, tmp_path: Path) -> None:
    """With ranks, scalings and layouts of every kind: B A of each module is what peft adds to it,
    and modules without an entry stay as they are."""
    base, merged = states(layout, tmp_path)
    file = read_adapter(tmp_path, "one")
    changed = load_adapter(file, alternates=layout == "gpt_oss")
    assert changed.keys() == file.modules.keys()
    for path, weights in changed.items():
        module = file.modules[path]
        if module.kind != "saved":
            wanted = module_weight(merged, path) - module_weight(base, path)
            torch.testing.assert_close(
                change(weights, module.kind == "embedding"), wanted, atol=1e-5, rtol=1e-5
            )
            assert weights.a is not None and len(weights.a) == module.rank
        for own, tensor in weights.saved.items():
            torch.testing.assert_close(tensor, merged[f"{path}.{own}"])
        if weights.bias is not None:
            wanted = merged[f"{path}.bias"] - base[f"{path}.bias"]
            torch.testing.assert_close(weights.scaling * weights.bias, wanted)
    differ = {name for name in base if not torch.equal(base[name], merged[name])}
    known = {own for path in changed for own in names_of(path)}
    assert differ and differ <= known


def names_of(path: str) -> list[str]:
    """Of the weights in a state that a module may stand for."""
    expert = re.fullmatch(r"(.+)\.mlp\.experts\.\d+\.(\w+)", path)
    if expert is None:
        return [f"{path}.weight", f"{path}.bias"]
    own = "down_proj" if expert[2] == "down_proj" else "gate_up_proj"
    return [f"{expert[1]}.{mixture}.experts.{own}" for mixture in ("mlp", "block_sparse_moe")]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "dora" in name])
def test_magnitudes_are_read(layout: str, tmp_path: Path) -> None:
    family, config = LAYOUTS[layout]
    model = make_adapter(random_model(family), tmp_path, **config)
    wanted = {
        re.sub(r"^base_model\.model\.|\.lora_magnitude_vector.*", "", name): tensor
        for name, tensor in model.state_dict().items()
        if "lora_magnitude" in name
    }
    found = load_adapter(read_adapter(tmp_path, "one"))
    assert found.keys() == wanted.keys()
    for path, weights in found.items():
        assert weights.magnitude is not None
        torch.testing.assert_close(weights.magnitude, wanted[path])


@pytest.mark.parametrize(
    ("layout", "prefix", "names"),
    [
        ("qwen3_moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    ],
)
def test_experts_one_by_one_are_those_together(
    layout: str, prefix: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """The layout of before transformers 5 gives the same modules."""
    family, _ = LAYOUTS[layout]
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    make_adapter(
        random_model(family), tmp_path / "a", target_modules=["q_proj"], target_parameters=targets
    )
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    unfuse_experts(tmp_path / "b", prefix, names)
    together, apart = (load_adapter(read_adapter(tmp_path / name, name)) for name in "ab")
    assert together.keys() == apart.keys()
    for path, weights in together.items():
        assert weights.scaling == apart[path].scaling
        for one, other in ((weights.a, apart[path].a), (weights.b, apart[path].b)):
            assert one is not None and other is not None
            torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_swapped_experts(tmp_path: Path) -> None:
    """Early versions of peft had A of experts on the side of the outputs."""
    from safetensors.torch import load_file, save_file

    config = {
        "target_modules": ["q_proj"],
        "target_parameters": LAYOUTS["granitemoe"][1]["target_parameters"],
    }
    make_adapter(random_model("qwen3_moe"), tmp_path / "a", **config)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file = tmp_path / "b" / "adapter_model.safetensors"
    tensors = load_file(file)
    rank, count = 4, 7
    for name in [name for name in tensors if ".experts." in name and "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        a, b = tensors[name], tensors[other]
        by_expert = b.view(len(b), rank, count).permute(2, 1, 0)  # [e, r, outputs]
        tensors[name] = by_expert.reshape(count * rank, -1).contiguous()
        by_rank = a.view(count, rank, -1).permute(2, 1, 0)  # [inputs, r, e]
        tensors[other] = by_rank.reshape(-1, count * rank).contiguous()
    save_file(tensors, file)
    usual, swapped = (load_adapter(read_adapter(tmp_path / name, name)) for name in "ab")
    assert usual.keys() == swapped.keys()
    for path, weights in usual.items():
        torch.testing.assert_close(change(weights, False), change(swapped[path], False))


@pytest.mark.parametrize("layout", ["plain", "saved", "ends", "qwen3_moe"])
def test_a_pickled_file_is_the_same_adapter(layout: str, tmp_path: Path) -> None:
    family, config = LAYOUTS[layout]
    base = random_model(family)
    for name, safe in (("a", True), ("b", False)):
        make_adapter(base, tmp_path / name, **config)
        if not safe:
            as_pickle(tmp_path / name)
    files = [read_adapter(tmp_path / name, name) for name in "ab"]
    assert files[0].digest == files[1].digest
    safe_weights, pickled = map(load_adapter, files)
    for path, weights in safe_weights.items():
        for own in ("a", "b"):
            one, other = getattr(weights, own), getattr(pickled[path], own)
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


def as_pickle(folder: Path) -> None:
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    torch.save(load_file(file), folder / "adapter_model.bin")
    file.unlink()


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    """Names of folders, adapters and tensors do not count; numbers and what they do, do."""
    base = random_model("llama")
    config = {"target_modules": ["q_proj", "v_proj"]}
    make_adapter(base, tmp_path / "a", **config)
    first = read_adapter(tmp_path / "a", "a").digest
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    settings = json.loads((tmp_path / "b" / "adapter_config.json").read_text())

    def digest(**changes: object) -> str:
        (tmp_path / "b" / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
        return read_adapter(tmp_path / "b", "b").digest

    assert digest(base_model_name_or_path="another", lora_dropout=0.5) == first
    assert digest(lora_alpha=9) != first
    assert digest(alpha_pattern={"2.self_attn.v_proj": 9}) != first
    assert digest(alpha_pattern={"2.self_attn.v_proj": 8}) == first
    assert digest(use_rslora=True) != first
    assert digest(use_rslora=True, lora_alpha=4) == first  # 4 / sqrt(4) = 8 / 4
    make_adapter(base, tmp_path / "c", seed=2, **config)
    assert read_adapter(tmp_path / "c", "a").digest != first


def test_modules_count_for_the_digest(tmp_path: Path) -> None:
    """The same numbers on other modules are another adapter."""
    from safetensors.torch import load_file, save_file

    make_adapter(random_model("llama"), tmp_path / "a", target_modules=["k_proj"])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file = tmp_path / "b" / "adapter_model.safetensors"
    tensors = {name.replace("k_proj", "v_proj"): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    digests = {read_adapter(tmp_path / name, "n").digest for name in "ab"}
    assert len(digests) == 2


def test_the_digest_is_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs while one piece is written: all of a mixture's would take long."""
    make_adapter(random_model("llama"), tmp_path, target_modules=[*ATTENTION, *MLP])
    lengths, dumps = [], json.dumps

    def measured(value: object) -> str:
        lengths.append(len(dumps(value)))
        return dumps(value)

    monkeypatch.setattr(adapter.json, "dumps", measured)
    num_modules = len(read_adapter(tmp_path, "a").modules)
    assert len(lengths) == num_modules > 7 and max(lengths) < 1000


def test_whole_weights_are_counted(tmp_path: Path) -> None:
    base = random_model("llama")
    family, config = LAYOUTS["saved"]
    assert family == "llama"
    make_adapter(base, tmp_path, **config)
    numbers = sum(base.get_submodule(n).weight.numel() for n in ("model.embed_tokens", "lm_head"))
    assert read_adapter(tmp_path, "a").saved_nbytes == 4 * numbers


def test_a_file_that_changes_between_is_found(tmp_path: Path) -> None:
    """Training may write over a folder that is being loaded; blocks of its old digest would then
    have keys and values of the new weights."""
    base = random_model("llama")
    make_adapter(base, tmp_path, target_modules=["q_proj"])
    file = read_adapter(tmp_path, "one")
    make_adapter(copy.deepcopy(base), tmp_path, seed=5, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match="was changed while it was loaded"):
        load_adapter(file)
    model = tmp_path / "adapter_model.safetensors"
    file = read_adapter(tmp_path, "one")
    model.write_bytes(model.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="became shorter"):
        load_adapter(file)
    shutil.rmtree(tmp_path)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors cannot be read"):
        load_adapter(file)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(value: float, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_adapter(random_model("llama"), tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "layers.2" in name and "lora_B" in name)
    tensors[name][3, 1] = value
    save_file(tensors, path)
    with pytest.raises(AdapterError, match=re.escape(name) + r".* has 1 numbers that are NaN"):
        load_adapter(read_adapter(tmp_path, "one"))
