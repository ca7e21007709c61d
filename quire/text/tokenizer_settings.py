"""The small files beside a vocabulary: which tokens are special, and the switches that go along."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from quire.files.json_file import read_json_object
from quire.protocol.errors import ModelError

ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

CLASS_ROLES: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
}
"""Special tokens that hold where tokenizer_config.json does not mention them."""

FROM_FILE = "TokenizersBackend"
"""transformers' name for "whatever tokenizer.json says"."""

MODEL_CLASSES = {
    "gpt2": "GPT2Tokenizer",
    "opt": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "mistral": FROM_FILE,
}
"""The class of a model type where tokenizer_config.json names none."""
OVERRULES_DECLARED_CLASS = ("qwen2", "mistral")
"""Model types whose published tokenizer_config.json names a class that does not fit."""


def added_token(value: str | dict[str, Any] | AddedToken, *, special: bool = False) -> AddedToken:
    """A token as the JSON files write it: a string, or an object with flags."""
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {key: flag for key, flag in value.items() if key != "__type"}
    return AddedToken(**{**flags, "special": special or flags.get("special", False)})


@dataclass
class TokenizerSettings:
    """tokenizer_config.json, special_tokens_map.json and added_tokens.json, understood."""

    config: dict[str, Any]
    tokenizer_class: str
    has_tokenizer_json: bool
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, AddedToken] = field(default_factory=dict)
    extra_special_tokens: list[AddedToken] = field(default_factory=list)
    added_tokens: list[AddedToken] = field(default_factory=list)
    """In the order of their ids."""
    add_bos: bool = False
    add_eos: bool = False

    @property
    def legacy(self) -> bool:
        return bool(self.config.get("legacy", False))

    @property
    def prefix_space(self) -> bool:
        return self.config.get("add_prefix_space") is not False

    @property
    def split_special_tokens(self) -> bool:
        return bool(self.config.get("split_special_tokens", False))

    @property
    def model_max_length(self) -> int | None:
        value = self.config.get("model_max_length")
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return int(value) if isinstance(value, (int, float)) else None

    def clean_up_spaces(self, is_bpe: bool) -> bool:
        """The clean-up was made for WordPiece; on BPE it would eat spaces that are text."""
        if is_bpe:
            key = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
            if not self.config.get(key, False):
                return False
        return bool(self.config.get("clean_up_tokenization_spaces", False))

    def use_sentencepiece_defaults(self) -> None:
        """A bare tokenizer.model means what Llama's means: `<s>` goes before the text."""
        for role, token in CLASS_ROLES["LlamaTokenizer"].items():
            if role not in self.config:
                self.special_tokens.setdefault(role, added_token(token))
        self.add_bos = bool(self.config.get("add_bos_token", True))

    def add_tokens_to(self, backend: Tokenizer) -> None:
        """Make the backend match added and special tokens whole."""
        named = {token.content for token in self.special_tokens.values()}
        wanted = [*self.added_tokens, *self.special_tokens.values(), *self.extra_special_tokens]
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        for token in wanted:
            token.special = token.special or token.content in named
        backend.add_tokens([token for token in wanted if token.content not in known])


def read_settings(folder: Path) -> TokenizerSettings:
    config = _read_optional(folder / "tokenizer_config.json")
    model_config = _read_optional(folder / "config.json")
    settings = TokenizerSettings(
        config=config,
        tokenizer_class=_tokenizer_class(config, model_config),
        has_tokenizer_json=(folder / "tokenizer.json").is_file(),
        chat_template=_chat_template(folder, config),
        add_bos=bool(config.get("add_bos_token", False)),
        add_eos=bool(config.get("add_eos_token", False)),
    )
    try:
        _read_tokens(folder, settings)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"the special tokens in {folder} (tokenizer_config.json, special_tokens_map.json, "
            f"added_tokens.json) cannot be read ({error}); download the model again."
        ) from error
    return settings


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _tokenizer_class(config: dict[str, Any], model_config: dict[str, Any]) -> str:
    declared = config.get("tokenizer_class") or model_config.get("tokenizer_class") or ""
    model_type = model_config.get("model_type")
    by_model = MODEL_CLASSES.get(model_type, "") if isinstance(model_type, str) else ""
    if not declared or model_type in OVERRULES_DECLARED_CLASS:
        return by_model
    return str(declared).removesuffix("Fast")


def _read_tokens(folder: Path, settings: TokenizerSettings) -> None:
    values: dict[str, Any] = {**CLASS_ROLES.get(settings.tokenizer_class, {}), **settings.config}
    by_id: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in values:
        for index, token in values["added_tokens_decoder"].items():
            by_id[int(index)] = added_token(token)
    else:
        mapped = _read_optional(folder / "special_tokens_map.json")
        for key, value in mapped.items():
            values[key] = added_token(value, special=True) if isinstance(value, dict) else value
        named = {_content(values[role]) for role in ROLES if values.get(role)}
        for text, index in _read_optional(folder / "added_tokens.json").items():
            special = text in named
            by_id[index] = AddedToken(text, normalized=not special, special=special)
    settings.added_tokens = [by_id[index] for index in sorted(by_id)]
    flags = {token.content: token for token in settings.added_tokens}
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        values.update(extra)
        extra = []
    settings.extra_special_tokens = [added_token(token) for token in extra]
    roles = [*ROLES, *_other_roles(values)]
    for role in roles:
        if values.get(role):
            token = added_token(values[role])
            settings.special_tokens[role] = flags.get(token.content, token)


def _other_roles(values: dict[str, Any]) -> list[str]:
    """Roles of a model's own, such as image_token."""
    return [
        key
        for key, value in values.items()
        if key.endswith("_token") and key not in ROLES and isinstance(value, (str, AddedToken))
    ]


def _content(value: str | dict[str, Any] | AddedToken) -> str:
    return added_token(value).content


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} cannot be read as text ({error}); download the model again."
        ) from error


def _chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Files of their own go before tokenizer_config.json; several templates are named."""
    templates: dict[str, str] = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        templates["default"] = _read_template(main)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_template(path)
    if not templates:
        declared = config.get("chat_template")
        if declared is None or isinstance(declared, str):
            return declared
        try:
            templates = {str(entry["name"]): str(entry["template"]) for entry in declared}
        except (TypeError, KeyError) as error:
            raise ModelError(
                f"chat_template in {folder / 'tokenizer_config.json'} must be a string or a list "
                f"of objects with name and template, got {str(declared)[:80]!r}; repair the file."
            ) from error
    return templates["default"] if list(templates) == ["default"] else templates
