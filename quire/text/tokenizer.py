"""`Tokenizer`: text to tokens and back, with the names that users know from transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from tokenizers import Tokenizer as Backend

from quire.config.locate import ModelSource
from quire.files.gguf import GGUFFile
from quire.protocol.errors import RequestError
from quire.text.chat_template import (
    is_batch,
    read_chat_template,
    render_chat,
    select_template,
)
from quire.text.detokenizer import TextStreams
from quire.text.tokenizer_check import is_panic
from quire.text.tokenizer_files import TokenizerParts, read_folder
from quire.text.tokenizer_gguf import read_gguf

SPACE_CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
RESERVED_TEMPLATE_KWARGS = (
    "chat_template",
    "messages",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_content_format",
    "return_dict",
)


def load_tokenizer(source: ModelSource, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model. `chat_template`, its text or a file, replaces the model's own."""
    if source.kind == "gguf":
        parts = read_gguf(GGUFFile(source.path).metadata, str(source.path))
    else:
        parts = read_folder(source.path)
    if chat_template is not None:
        parts.chat_template = read_chat_template(chat_template)
    return Tokenizer(parts, source.name)


class EncodedText(dict[str, Any]):
    """`input_ids` and `attention_mask`, as keys and as attributes."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class Tokenizer:
    """Text <-> tokens for one model."""

    is_fast = True

    def __init__(self, parts: TokenizerParts, name_or_path: str = "") -> None:
        self.backend: Backend = parts.backend
        self.name_or_path = name_or_path
        self.chat_template = parts.chat_template
        """One template, or several by name."""
        self.special_tokens_map = dict(parts.special_tokens)
        self.extra_special_tokens = list(parts.extra_special_tokens)
        self.cleans_up_spaces = parts.clean_up_spaces
        self.model_max_length = parts.model_max_length

    def __repr__(self) -> str:
        return f"Tokenizer({self.name_or_path!r}, {len(self)} tokens)"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Many texts at once, on all cores."""
        try:
            encodings = self.backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except TypeError:
            _explain_bad_text(texts)
            raise
        except BaseException as error:
            # Such as a text with a character that the vocabulary has no token for.
            if type(error) is not Exception and not is_panic(error):
                raise
            raise RequestError(f"prompt cannot be tokenised by this model ({error}).") from error
        return [encoding.ids for encoding in encodings]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> EncodedText:
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return EncodedText(input_ids=ids, attention_mask=[1] * len(ids))
        batch = self.encode_batch(text, add_special_tokens)
        return EncodedText(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        ids = self.encode(text, add_special_tokens)
        return [self.backend.id_to_token(token) or "" for token in ids]

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else _as_list(token_ids)
        try:
            text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            bad = next(token for token in ids if not 0 <= token < 2**32)
            raise RequestError(
                f"token_ids must lie in the vocabulary of {len(self)} tokens, got {bad}."
            ) from None
        if self.cleans_up_spaces:
            for before, after in SPACE_CLEAN_UPS:
                text = text.replace(before, after)
        return text

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> Any:
        """Tokens as the vocabulary spells them (None for ids beyond it)."""
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        hidden = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend.id_to_token(token) for token in _as_list(ids) if token not in hidden]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Ids of tokens; the unknown token's for those not in the vocabulary."""
        if isinstance(tokens, str):
            index = self.backend.token_to_id(tokens)
            if index is None and self.unk_token is not None:
                index = self.backend.token_to_id(self.unk_token)
            return index
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        added = self.backend.get_added_tokens_decoder()
        return {added[index].content: index for index in sorted(added)}

    @cached_property
    def vocab_size(self) -> int:
        """Without added tokens; `len()` counts them too."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    @cached_property
    def _num_tokens(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.special_tokens_map.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._role_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._role_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._role_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._role_id("unk_token")

    def _role_id(self, role: str) -> int | None:
        token = self.special_tokens_map.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def max_chars_per_token(self) -> int:
        """Characters of the longest token: byte-level ones are spelled with one for each byte."""
        return max(map(len, self.get_vocab()), default=1)

    @cached_property
    def all_special_tokens(self) -> list[str]:
        tokens = [*self.special_tokens_map.values(), *self.extra_special_tokens]
        return list(dict.fromkeys(tokens))

    @cached_property
    def all_special_ids(self) -> list[int]:
        ids = self.convert_tokens_to_ids(self.all_special_tokens)
        return [index for index in ids if index is not None]

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of the tokens that `skip_special_tokens` leaves out of texts, by their spelling."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    @cached_property
    def streams(self) -> TextStreams:
        """For turning tokens into text as they come."""
        return TextStreams(self.backend, self.decode, self.cleans_up_spaces)

    def render_chat(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_call_parser: str = "auto",
    ) -> str:
        """The prompt of one conversation. Unlike `apply_chat_template`, which does what
        transformers does, it tells of tools also where the template knows nothing of them."""
        variables = template_kwargs or {}
        for name in RESERVED_TEMPLATE_KWARGS:
            if name in variables:
                raise RequestError(
                    f"chat_template_kwargs[{name!r}] has a field of its own; set it there."
                )
        template = select_template(self.chat_template, chat_template, tools is not None)
        return render_chat(
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=content_format,
            variables={**self.special_tokens_map, **variables},
            tool_call_parser=tool_call_parser,
        )

    def apply_chat_template(
        self,
        /,
        messages: Sequence[Any],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The prompt of a conversation: token ids or text. Of each, for a list of conversations.

        `chat_template` is a template or the name of one of the model's. Further arguments reach the
        template as variables.
        """
        template = select_template(self.chat_template, chat_template, tools is not None)
        several = is_batch(messages)
        prompts = [
            render_chat(
                template,
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                content_format=chat_template_content_format,
                variables={**self.special_tokens_map, **kwargs},
            )
            for conversation in (messages if several else [messages])
        ]
        if not tokenize:
            return prompts if several else prompts[0]
        encoded = self(prompts if several else prompts[0], add_special_tokens=False)
        return encoded if return_dict else encoded.input_ids

    def bad_words_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences of words, each as it starts a text and, if a token more, inside one."""
        sequences: list[list[int]] = []
        for word in words:
            bare = word.lstrip() or word
            first, inside = self.encode_batch([bare, " " + bare], add_special_tokens=False)
            if first:
                sequences.append(first)
            if first and inside and len(first) == len(inside) and first[0] != inside[0]:
                sequences.append(inside)
        return sequences


def _as_list(token_ids: Any) -> list[int]:
    """Plain integers, from a list or an array."""
    return list(token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids)


def _explain_bad_text(texts: Sequence[Any]) -> None:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            _refuse(index, f"must be a string, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            _refuse(index, f"has a lone surrogate {text[error.start]!r} at character {error.start}")


def _refuse(index: int, problem: str) -> NoReturn:
    raise RequestError(f"text {index} {problem}; send valid Unicode text.")
