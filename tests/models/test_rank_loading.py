"""A rank reads its share of the files and nothing else: neither tensors of other stages nor, of
those that it shares, what other ranks keep.

Measured by the pages of the mapped files that this process has touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.model import ModelConfig, load_model_config
from quire.layers.parallel import Parallel, Stage
from quire.loading import weights as reading
from quire.models import loader
from quire.models.loader import count_weight_bytes, held_weight_bytes, load_model
from quire.protocol.errors import ModelError
from tests.loading.converted import convert
from tests.models.packers import CASES
from tests.models.reference import random_model, save_bin, save_safetensors

VOCAB, HIDDEN = 1 << 16, 64
MATRIX = VOCAB * HIDDEN * 4
"""Bytes of the embeddings, and of the output head: nearly all that the model has."""
SLACK = 6 << 20
"""The rest of it, and what the kernel maps along with a page that is touched: up to 2 MiB at either
end of a share."""


@pytest.fixture(scope="module", params=["safetensors", "bin", "gguf"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model("llama", vocab_size=VOCAB)
    if request.param == "bin":
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return load_model_config(str(save_bin(model, folder, tensors)))
    if request.param == "gguf":
        return load_model_config(str(convert(model, "llama", folder / "model.gguf")))
    return load_model_config(str(save_safetensors(model, folder)))


def touched_bytes(path: Path) -> int:
    """Of files under `path` that are mapped into this process."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counts = str(path) in line
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (Parallel(), 2.0),
        (Parallel(2, 4), 0.5),
        (Parallel(0, 1, stage=Stage(0, 3)), 1.0),
        (Parallel(0, 1, stage=Stage(1, 3)), 0.0),
        (Parallel(1, 2, stage=Stage(2, 3)), 0.5),
    ],
    ids=["alone", "one of 4", "first of 3", "second of 3", "one of 2, last of 3"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_more_is_read_than_is_kept(
    config: ModelConfig,
    parallel: Parallel,
    expected: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed as they arrive (float32), and copied into parameters (bfloat16)."""
    kept: list[object] = []

    def holding(*arguments: object) -> Iterator[object]:
        """The weights as the loader gets them; files stay mapped while any of them is there."""
        for pair in reading.iter_weights(*arguments):
            kept.append(pair)
            yield pair

    monkeypatch.setattr(loader, "iter_weights", holding)
    path = config.source.path
    before = touched_bytes(path)
    model = load_model(config, dtype=dtype, device="cpu", parallel=parallel)
    touched = touched_bytes(path) - before
    assert expected * MATRIX <= touched < expected * MATRIX + SLACK
    foretold = count_weight_bytes(config, dtype=dtype, device="cpu", parallel=parallel)
    assert 0 <= foretold - held_weight_bytes(model) < 1 << 16  # parts are rounded up, and joined


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
def test_ranks_with_whole_experts_read_no_others(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor for each matrix of an expert, or one for those of all; 3 ranks share 4 experts."""
    width = 1 << 13
    model = random_model(family, intermediate_size=width, num_local_experts=4, num_hidden_layers=1)
    config = load_model_config(str(save_safetensors(model, tmp_path)))
    expert = 3 * width * HIDDEN * 4
    kept: list[object] = []

    def holding(*arguments: object) -> Iterator[object]:
        for pair in reading.iter_weights(*arguments):
            kept.append(pair)
            yield pair

    monkeypatch.setattr(loader, "iter_weights", holding)
    for rank, count in enumerate((1, 1, 2)):
        kept.clear()
        parallel = Parallel(rank, 3, expert_parallel=True)
        before = touched_bytes(config.source.path)
        model = load_model(config, dtype=torch.bfloat16, device="cpu", parallel=parallel)
        touched = touched_bytes(config.source.path) - before
        assert count * expert <= touched < count * expert + SLACK
        foretold = count_weight_bytes(config, dtype=torch.bfloat16, device="cpu", parallel=parallel)
        assert foretold == held_weight_bytes(model)


def test_other_stages_may_not_be_missing_anything(tmp_path: Path) -> None:
    """A stage asks for its own tensors by name, takes no notice of the others', and still finds
    what belongs to none."""
    model = random_model("llama")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(96, 64)
    config = load_model_config(str(save_bin(model, tmp_path, tensors)))
    with pytest.raises(ModelError, match=r"model\.layers\.3\.mlp") as first:
        load_model(config, dtype=torch.float32, device="cpu", parallel=stage(0))
    assert "missing" not in str(first.value)
    with pytest.raises(ModelError, match=r"1 tensor missing: model\.layers\.2\.mlp\.up_proj"):
        load_model(config, dtype=torch.float32, device="cpu", parallel=stage(1))


@pytest.mark.parametrize(
    "parallel",
    [Parallel(stage=Stage(0, 2)), Parallel(0, 2, expert_parallel=True)],
    ids=["stage", "experts"],
)
def test_biases_of_zeros_are_for_the_ranks_with_their_matrices(
    parallel: Parallel, tmp_path: Path
) -> None:
    """Some packers write one for each matrix; one that says something is not the model's."""
    save_safetensors(random_model("mixtral"), tmp_path)
    file, one = tmp_path / "config.json", CASES["gptq"]
    described = {**json.loads(file.read_text()), "quantization_config": one.config}
    file.write_text(json.dumps(described))
    stored: dict[str, torch.Tensor] = {}
    biases: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not re.search(r"layers.*(_proj|w[123])\.weight", name):
            stored[name] = tensor
            continue
        parts, _ = one.packer(tensor)
        module = name.removesuffix("weight")
        stored |= {module + key: part for key, part in parts.items()}
        biases[module + "bias"] = torch.zeros(len(tensor))
    assert "model.layers.2.block_sparse_moe.experts.4.w2.bias" in biases
    save_file({**stored, **biases}, tmp_path / "model.safetensors")
    config = load_model_config(str(tmp_path))
    load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)
    own = "model.layers.0.block_sparse_moe.experts.0.w1.bias"
    biases[own] = torch.ones(64)
    save_file({**stored, **biases}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"not part of the model: {own}"):
        load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)


def test_a_tied_head_that_differs_is_found_on_every_stage_that_has_it(tmp_path: Path) -> None:
    model = random_model("llama", tie_word_embeddings=True)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["lm_head.weight"] += 1
    config = load_model_config(str(save_bin(model, tmp_path, tensors)))
    for index in (0, 2):
        with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens"):
            load_model(config, dtype=torch.float32, device="cpu", parallel=stage(index, 3))
    load_model(config, dtype=torch.float32, device="cpu", parallel=stage(1, 3))


def stage(index: int, count: int = 2) -> Parallel:
    return Parallel(stage=Stage(index, count))


def test_dummy_weights_of_stages_are_those_of_the_model(tmp_path: Path) -> None:
    config = load_model_config(str(save_safetensors(random_model("llama"), tmp_path)))

    def dummy(parallel: Parallel) -> dict[str, torch.Tensor]:
        model = load_model(
            config, dtype=torch.bfloat16, device="cpu", load_format="dummy", parallel=parallel
        )
        return model.state_dict()

    whole = dummy(Parallel())
    parts = [dummy(stage(index)) for index in (0, 1)]
    assert not parts[0].keys() & parts[1].keys() - {"model.rotary.cos", "model.rotary.sin"}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(tensor, whole[name]), name
    assert parts[0].keys() | parts[1].keys() == whole.keys()
