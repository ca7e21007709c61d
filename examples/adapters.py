"""Two fine-tuned models that share the weights and the batches of one base.

The adapters are made up, as training takes longer than an example may: a real one is a folder that
peft's `save_pretrained` wrote. Both files of such a folder are written here.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.lora.request import LoRARequest

RANK, HIDDEN, LAYERS = 8, 576, range(10, 14)
PROMPT = "The capital of France is"


def write_adapter(folder: Path, seed: int, size: float) -> Path:
    """One that changes the output of attention in some layers."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in LAYERS:
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=random) * size
        tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=random) * size
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


with tempfile.TemporaryDirectory() as temporary:
    gentle = write_adapter(Path(temporary) / "gentle", 1, 0.11)
    strong = write_adapter(Path(temporary) / "strong", 2, 0.2)
    adapters = [None, LoRARequest("gentle", 1, str(gentle)), LoRARequest("strong", 2, str(strong))]

    with LLM(enable_lora=True, max_loras=2, max_lora_rank=RANK) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        # One batch: each prompt has its own adapter, or none.
        outputs = llm.generate([PROMPT] * 3, params, lora_request=adapters)
        for adapter, output in zip(adapters, outputs, strict=True):
            name = "no adapter" if adapter is None else adapter.lora_name
            print(f"{name}: {output.outputs[0].text!r}")
        print(f"loaded: {sorted(llm.list_loras())}")
