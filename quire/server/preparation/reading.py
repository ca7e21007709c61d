"""From the bytes of a body to what its route makes of them; in whichever process."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ValidationError

from quire.protocol.errors import QuireError
from quire.protocol.sampling import SamplingParams
from quire.server.http.errors import InvalidBodyError
from quire.server.openai.response_format import form_field
from quire.server.preparation.bodies import GenerationBody, RequestBody
from quire.server.preparation.context import Preparation, Prepared, PreparedKind


def is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def check_content_type(request: Request) -> None:
    """Bodies of another type than JSON are not looked at."""
    if not is_json(request.headers.get("content-type", "")):
        raise InvalidBodyError(
            "the body is not a JSON object; send one, with 'Content-Type: application/json'."
        )


def read_body(kind: type[BaseModel], data: bytes) -> Any:
    """The body that `data` holds; raises `InvalidBodyError`."""
    try:
        value = json.loads(data) if data else None
    except json.JSONDecodeError as error:
        raise InvalidBodyError(
            f"the body is not JSON: {error.msg} (at character {error.pos})."
        ) from None
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        raise InvalidBodyError(f"the body is not JSON that can be read: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidBodyError(
            "the body is not a JSON object; send one, with 'Content-Type: application/json'."
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        # All errors of a long list would take longer to write down than to find.
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        where = [str(part) for part in errors[0]["loc"]]
        text = f"{'.'.join(where) or 'the body'}: {errors[0]['msg']}."
        if len(forms := _forms([one["loc"] for one in errors])) > 1:
            text = f"{where[0]} must be one of {', '.join(forms)}, and is none of them."
        raise InvalidBodyError(text, where[0] if where else None) from None


def _forms(places: list[tuple[int | str, ...]]) -> list[str]:
    """The types that the field of the first error may have, if it may have several: pydantic names
    them where an object would have a field and a list an index."""
    kinds = dict.fromkeys(str(p[1]) for p in places if p[:1] == places[0][:1] and len(p) > 1)
    return [kind for kind in kinds if re.match(r"(str|list|dict)\b", kind)]


def prepare(preparation: Preparation, kind: PreparedKind, data: bytes) -> Prepared | bytes:
    body = read_body(kind.body, data)
    field: str | None = None
    try:
        if isinstance(body, RequestBody):
            body.refuse_unsupported()
        if isinstance(body, GenerationBody):
            field = form_field(body)
        made = kind.prepare(preparation, body)
        if isinstance(made, Prepared) and isinstance(made.params, SamplingParams):
            preparation.inputs.prepare_params(made.params)  # long lists that are refused stay here
        return made
    except QuireError as error:
        error.__dict__["form_field"] = field
        raise
