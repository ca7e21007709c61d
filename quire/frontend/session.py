"""`Session`: what clients of an engine share: its tokenizer, its checks and its defaults."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from quire.config.embedded import CHAT_MAX_TOKENS
from quire.config.locate import locate_model
from quire.config.log import configure_logging
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.engine.core import EngineCore
from quire.engine.startup import find_model, start_engine
from quire.engine.structured_output.grammar_source import Vocabulary
from quire.files.json_file import read_json_object
from quire.frontend.inputs import InputProcessor
from quire.frontend.step_loop import no_full_collections
from quire.protocol.errors import ModelError, QuireError, RequestError
from quire.protocol.sampling import RepetitionDetectionParams, SamplingParams
from quire.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

MAX_NEW_TOKENS = "max_new_tokens"
KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    MAX_NEW_TOKENS: "max_tokens",
}
CHAT_REPETITION = RepetitionDetectionParams(max_pattern_size=64, min_pattern_size=16, min_count=4)
"""Ends a chat of the embedded model that goes round in circles. Of a shorter cycle, several make up
a pattern: 64 tokens in a row are no list or table any more."""


class Session:
    """One client's side of an engine that may run elsewhere. `options` are the resolved ones."""

    def __init__(
        self,
        model: ModelConfig,
        options: EngineOptions,
        tokenizer: Tokenizer | None,
        client_index: int = 0,
    ) -> None:
        self.options = options
        self.model_config = model
        source = options.model.generation_config
        self.default_params: SamplingParams = generation_defaults(source, model)
        self.chat_params: SamplingParams = chat_defaults(source, model)
        self.inputs = InputProcessor(
            tokenizer, model.vocab_size, model.eos_token_ids, options, client_index
        )

    @property
    def has_tokenizer(self) -> bool:
        return self.inputs.tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.inputs.loaded_tokenizer

    def vocabulary(self) -> Vocabulary:
        """What grammars must know of the tokenizer."""
        backend = self.tokenizer.backend
        if backend.padding is not None or backend.truncation is not None:
            backend = Backend.from_str(backend.to_str())
            backend.no_padding()
            backend.no_truncation()
        size = max(self.model_config.vocab_size, len(self.tokenizer))
        return Vocabulary(backend.to_str(), size, self.inputs.eos_token_ids)


def start_session(arguments: dict[str, Any]) -> tuple[Session, EngineCore]:
    """An engine in this process, and its one client. Where an option or the model will not do, the
    error has no traceback of the steps in between: they are logged at DEBUG."""
    started = time.perf_counter()
    options = EngineOptions.from_arguments(**arguments)
    configure_logging(options.observability.log_level)
    try:
        session, core = _start_session(options)
    except QuireError as error:
        logger.debug("the engine did not start", exc_info=error)
        raise error.with_traceback(None) from None
    logger.info("ready in %.1f s", time.perf_counter() - started)
    return session, core


def _start_session(options: EngineOptions) -> tuple[Session, EngineCore]:
    with no_full_collections():  # importing torch alone would cause several
        model = find_model(options)
        # First: once its weights are loaded, the engine returns memory that was needed only for a
        # while.
        tokenizer = session_tokenizer(model, options)
        engine = start_engine(options, model)
        session = Session(engine.model, engine.options, tokenizer)
        if session.has_tokenizer:
            engine.core.read_vocabulary_by(session.vocabulary)
        return session, engine.core


def session_tokenizer(model: ModelConfig, options: EngineOptions) -> Tokenizer | None:
    """The one that the options ask for; None if they ask for none."""
    wanted = options.model
    if wanted.skip_tokenizer_init:
        return None
    source = model.source
    if wanted.tokenizer is not None and wanted.tokenizer != source.name:
        source = locate_model(
            wanted.tokenizer,
            revision=wanted.tokenizer_revision or wanted.revision,
            token=wanted.hf_token,
            load_format="dummy",  # no weights are wanted
            download_dir=wanted.download_dir,
        )
    return load_tokenizer(source, wanted.chat_template)


def generation_defaults(source: str, model: ModelConfig) -> SamplingParams:
    """`source` is the option generation_config: "auto", "vllm" or a folder."""
    values, where = _recommended(source, model)
    wanted = {name: values[key] for key, name in KEYS.items() if values.get(key) is not None}
    try:
        return SamplingParams(**wanted)
    except RequestError as error:
        raise ModelError(f"{where}: {error} Set generation_config='vllm' to ignore it.") from None


def chat_defaults(source: str, model: ModelConfig) -> SamplingParams:
    """The same for chats, which end where the model ends them, or at `max_new_tokens`."""
    params = generation_defaults(source, model)
    if source == "auto" and model.source.is_embedded:
        return dataclasses.replace(
            params, max_tokens=CHAT_MAX_TOKENS, repetition_detection=CHAT_REPETITION
        )
    values, _ = _recommended(source, model)
    return dataclasses.replace(params, max_tokens=values.get(MAX_NEW_TOKENS))


def _recommended(source: str, model: ModelConfig) -> tuple[dict[str, Any], str]:
    """What a generation_config.json says, and where it lies."""
    if source == "vllm":
        return {}, ""
    if source == "auto":
        return model.generation, "the model's generation_config.json"
    path = Path(source) / "generation_config.json"
    if not path.is_file():
        raise ModelError(
            f"generation_config={source!r}: {path} does not exist; use 'auto' (the model's "
            "own), 'vllm' (none) or a folder with such a file."
        )
    return read_json_object(path), str(path)
