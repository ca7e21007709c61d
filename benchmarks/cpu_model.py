"""The embedded model in the formats that the peers of `cpu.py` read, all with the same weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.model import load_model_config
from quire.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from quire.config.model import ModelConfig


def write_safetensors(folder: Path, model: ModelConfig | None = None) -> Path:
    """A folder as transformers saves it, with the dequantised weights in float32."""
    from safetensors.torch import save_file

    from quire.loading.weights import read_weights

    model = model or load_model_config(None)
    weights = {
        name: tensor.float().contiguous() for name, tensor in read_weights(model.source).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(model.source)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_position_tokens,
        "chat_template": tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    # Written last: where it is, the rest is too.
    _write_json(folder / "config.json", model.raw)
    return folder


def write_q8_0(path: Path, source: Path) -> Path:
    """A copy of a GGUF file whose matrices are quantised to 8 bits instead."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.get_field(gguf.Keys.General.ARCHITECTURE).contents()
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, architecture)
    for name, field in reader.fields.items():
        kinds = field.types
        # The header counts come under names of their own; the writer adds the architecture itself.
        if name.startswith("GGUF.") or name == gguf.Keys.General.ARCHITECTURE:
            continue
        if name == gguf.Keys.General.FILE_TYPE:
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        else:
            inner = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kinds[0], inner)
    wanted = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def convert_to_openvino(python: str, source: Path, folder: Path, weights: str) -> Path:
    """The model of a safetensors folder as OpenVINO reads it, made by optimum-cli beside `python`;
    `weights` is a --weight-format."""
    partial = folder.with_name(folder.name + ".partial")
    command = [str(Path(python).parent / "optimum-cli"), "export", "openvino"]
    command += ["-m", str(source), "--task", "text-generation-with-past"]
    command += ["--weight-format", weights, str(partial)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run ({error.strerror})") from None
    if result.returncode:
        raise RuntimeError(f"optimum-cli failed: {result.stderr.strip().splitlines()[-1]}")
    partial.rename(folder)
    return folder


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
