"""Engines that cannot start, or not as asked: bad options, too little memory, broken models."""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, ModelError, OptionError, SamplingParams
from quire.config.embedded import embedded_model_path
from tests.frontend.conftest import Tiny
from tests.frontend.refusals import refuses
from tests.tiny import MAX_LEN, tiny_llm

GOOD = "A good prompt"
SHORT = SamplingParams(temperature=0.0, max_tokens=2)


def start(tiny: Tiny, **options: Any) -> Callable[[], Any]:
    return lambda: tiny_llm(tiny.folder, **options)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"block_size": 3}, ("block_size", "3", "power of two from 4 to 128")),
        ({"block_size": 256}, ("block_size", "256", "power of two")),
        ({"max_model_len": MAX_LEN + 1}, ("max_model_len", f"{MAX_LEN + 1}", f"{MAX_LEN}")),
        ({"gpu_memory_utilization": 1.5}, ("gpu_memory_utilization", "1.5")),
        ({"max_num_seqs": 0}, ("max_num_seqs", "0")),
        ({"dtype": "int4"}, ("dtype", "int4", "float32")),
        ({"scheduling_policy": "lifo"}, ("scheduling_policy", "lifo", "priority")),
        ({"attention_backend": "flash"}, ("attention_backend", "flash")),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            ("distributed_executor_backend='uni'", "tensor_parallel_size=2", "unset"),
        ),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            ("external_launcher", "pipeline_parallel_size=2", "'mp'"),
        ),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "ray"},
            ("nnodes=2", "'ray'", "unset"),
        ),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, ("node_rank=2", "nnodes=2")),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1},
            ("node_rank=1", "host 0", "quire serve"),
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "0.0.0.0"},
            ("master_addr='0.0.0.0'", "host 0", "reach"),
        ),
        ({"nnodes": 2, "tensor_parallel_size": 3}, ("nnodes=2", "3 ranks", "multiple")),
        ({"data_parallel_size": 2}, ("data_parallel_size=2", "several servers behind a proxy")),
        ({"distributed_executor_backend": "x"}, ("distributed_executor_backend", "'x'", "'ray'")),
        ({"enable_lora": True, "max_lora_rank": 0}, ("max_lora_rank", "from 1 to 4096")),
        (
            {"enable_lora": True, "distributed_executor_backend": "external_launcher"},
            ("enable_lora=True", "external_launcher", "'mp'"),
        ),
        (
            {
                "speculative_config": {"method": "auto"},
                "distributed_executor_backend": "external_launcher",
            },
            ("speculative_config", "'auto' measures", "external_launcher", "'ngram'"),
        ),
        (
            {"target_itl_ms": 20, "distributed_executor_backend": "external_launcher"},
            ("target_itl_ms=20", "external_launcher", "unset"),
        ),
        (
            {"speculative_config": {"method": "medusa", "model": "x"}},
            ("speculative_config", "'medusa' is not supported"),
        ),
        ({"cpu_offload_gb": 4}, ("cpu_offload_gb=4", "not supported yet")),
        (
            {"gpu_memory_utilisation": 0.5},
            ("gpu_memory_utilisation", "gpu_memory_utilization?"),
        ),
        ({"max_num_sequences": 4}, ("max_num_sequences", "Did you mean max_num_seqs?")),
    ],
)
def test_bad_options(options: dict[str, Any], parts: tuple[str, ...], tiny: Tiny) -> None:
    refuses(start(tiny, **options), *parts, kind=OptionError)


def test_too_little_memory_for_one_request(tiny: Tiny) -> None:
    refuses(
        start(tiny, kv_cache_memory_bytes=20_000),
        "too small for one request",
        f"max_model_len={MAX_LEN}",
        "Lower max_model_len to at most",
        "kv_cache_memory_bytes",
        kind=OptionError,
    )
    with pytest.raises(OptionError) as caught:
        tiny_llm(tiny.folder, num_gpu_blocks_override=3)
    fits = int(re.search(r"at most (\d+)", str(caught.value))[1])  # type: ignore[index]
    assert fits == 48
    with tiny_llm(tiny.folder, num_gpu_blocks_override=3, max_model_len=fits) as llm:
        assert llm.generate(GOOD, SHORT, use_tqdm=False)[0].finished
    with tiny_llm(tiny.folder, num_gpu_blocks_override=3, max_model_len="auto") as llm:
        assert llm.options.model.max_model_len == fits


def test_harmless_arguments_warn_once_each(tiny: Tiny) -> None:
    """The warning points at the caller's line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with LLM(str(tiny.folder), swap_space=4, disable_custom_all_reduce=True) as llm:
            llm.generate(GOOD, SHORT, use_tqdm=False)
    ours = [w for w in caught if "has no effect" in str(w.message)]
    names = [str(w.message).split("=")[0] for w in ours]
    assert names == ["swap_space", "disable_custom_all_reduce"]
    assert {w.filename for w in ours} == {__file__}


# --- broken models --------------------------------------------------------------------------------


def _copy(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.folder, tmp_path / "model"))


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _corrupt(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')


def _drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _rename(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["FalconForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (_truncate, ("model.safetensors", "damaged or incomplete", "download")),
        (_corrupt, ("config.json",)),
        (_drop_weights, ("no weights", "*.safetensors", "download")),
        (_rename, ("FalconForCausalLM", "LlamaForCausalLM")),
    ],
)
def test_broken_model_folders(
    damage: Callable[[Path], None], parts: tuple[str, ...], tiny: Tiny, tmp_path: Path
) -> None:
    folder = _copy(tiny, tmp_path)
    damage(folder)
    refuses(lambda: tiny_llm(folder), str(folder), *parts, kind=ModelError)


@pytest.mark.parametrize("keep", [0, 3, 20, 4_000, 100_000_000 - 7])
def test_a_truncated_gguf_file(keep: int, tmp_path: Path) -> None:
    original = embedded_model_path()
    file = tmp_path / "cut.gguf"
    with original.open("rb") as source:
        file.write_bytes(source.read(min(keep, original.stat().st_size - 7)))
    refuses(lambda: LLM(str(file)), "cut.gguf", kind=ModelError)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    refuses(lambda: LLM(str(tmp_path / "nothing")), "nothing", kind=ModelError)
    (tmp_path / "empty").mkdir()
    refuses(lambda: LLM(str(tmp_path / "empty")), "config.json", kind=ModelError)
    # Hub names need the network, which tests do without.
    refuses(lambda: LLM("nowhere/no-such-model"), "nowhere/no-such-model", kind=ModelError)


def test_chat_without_a_template(tiny: Tiny, tmp_path: Path) -> None:
    folder = _copy(tiny, tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with tiny_llm(folder) as llm:
        refuses(lambda: llm.chat([{"role": "user", "content": "x"}], SHORT), "chat_template")


def test_the_log_says_whether_numbers_depend_on_the_batch(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "quire"), tiny_llm(tiny.folder):
        pass
    line = r"attention: cpu .*, numbers of a request independent of the rest of its batch"
    assert any(re.search(line, message) for message in caplog.messages)
