"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's bodies and answers. They are
there where `--allow-runtime-lora` is set, and for the admin key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from quire.config.adapters import AdapterModule, adapter_folder, check_adapter_name
from quire.protocol.errors import AdapterError, OptionError
from quire.server.http.errors import UnknownModelError
from quire.server.preparation.adapter_names import reference_to
from quire.server.state import ServerState, state_of

router = APIRouter()


class LoadBody(BaseModel):
    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False
    """Whether the name may be that of a loaded adapter, which this one replaces."""
    base_model_name: str | None = None


class UnloadBody(BaseModel):
    lora_name: str | None = None
    lora_int_id: int | None = None
    """Not needed: names are unique."""


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadBody, request: Request) -> PlainTextResponse:
    """The adapter is in the memory of the host when this answers."""
    state = state_of(request)
    if not body.lora_name or not body.lora_path:
        raise AdapterError("Both 'lora_name' and 'lora_path' must be provided.")
    name = _checked_name(state, body.lora_name)
    if not body.load_inplace and state.preparation.adapters.find(name) is not None:
        raise AdapterError(
            f"The lora adapter {name!r} has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True."
        )
    if not adapter_folder(body.lora_path).is_dir():
        raise UnknownModelError(
            f"No adapter found for {name!r}: {body.lora_path!r} is not a folder on this machine."
        )
    module = AdapterModule(name, body.lora_path, body.base_model_name)
    await state.llm.add_lora(reference_to(module, load_inplace=body.load_inplace))
    state.preparation.adapters.add(module)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadBody, request: Request) -> PlainTextResponse:
    """Requests that use the adapter go on to their end."""
    state = state_of(request)
    if not body.lora_name:
        raise AdapterError("'lora_name' needs to be provided to unload a LoRA adapter.")
    adapters = state.preparation.adapters
    module = adapters.find(body.lora_name)
    if module is None:
        raise UnknownModelError(f"The lora adapter '{body.lora_name}' cannot be found.")
    adapters.remove(body.lora_name)
    await state.llm.remove_lora(reference_to(module).lora_int_id)
    if adapters.find(body.lora_name) is not None:
        return PlainTextResponse(
            f"Success: LoRA adapter '{body.lora_name}' removed from memory. It is in the folder of "
            "--lora-folder, and is loaded again when a request names it: move it away to end that."
        )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _checked_name(state: ServerState, name: str) -> str:
    try:
        check_adapter_name(name)
    except OptionError as error:
        raise AdapterError(str(error)) from None
    if name in state.model_names:
        raise AdapterError(f"lora_name is {name!r}, the model's own name; give another.")
    return name
