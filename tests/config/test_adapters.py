"""How adapters are named, as vLLM's scripts do it."""

from __future__ import annotations

from quire.config.adapters import AdapterModule, read_modules
from quire.lora.request import LoRARequest


def test_requests_have_the_fields_of_vllm() -> None:
    request = LoRARequest("sql", 1, "./sql", "base", None, True, True)
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("sql", 1, "./sql")
    assert request.base_model_name == "base" and request.load_inplace
    assert LoRARequest("sql", 2, lora_path="./other", is_3d_lora_weight=True) == request


def test_modules_have_the_fields_of_vllm() -> None:
    texts = ("sql=./sql", '{"name": "fr", "path": "./fr", "is_3d_lora_weight": true}')
    assert read_modules(texts) == (AdapterModule("sql", "./sql"), AdapterModule("fr", "./fr"))
