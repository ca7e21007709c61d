"""What drafts for a target: which method follows from `speculative_config['model']`, and the
configuration of the model or head. No torch."""

from __future__ import annotations

from dataclasses import replace

from quire.config.eagle3 import EAGLE3, Eagle3Config
from quire.config.model import MTP_ARCHITECTURES, ModelConfig, read_model
from quire.config.options import EngineOptions
from quire.config.resolve import check_quantization
from quire.config.speculative import FROM_MODEL, HEADS, SpeculativeConfig
from quire.files.vocabulary import read_vocabulary
from quire.protocol.errors import OptionError


def settle_speculation(options: EngineOptions, target: ModelConfig) -> EngineOptions:
    """Options whose `speculative_config` names its method and how many tokens are drafted, where
    these follow from checkpoints; refuses a model that cannot draft in the way that is asked for.
    """
    wanted = options.decoding.speculation
    if wanted is None or not (wanted.uses_model or wanted.method in (FROM_MODEL, *HEADS)):
        return options
    method = _method(options, wanted, target)
    config, longest = target, wanted.max_model_len
    if method in ("draft_model", "auto"):
        config, num_tokens = draft_config(options, wanted), wanted.num_tokens
        _check_vocabulary(config, wanted, target)
        longest = min(longest or config.max_position_tokens, config.max_position_tokens)
    elif method == "mtp":
        num_tokens = wanted.num_tokens or mtp_config(target).num_layers - target.num_layers
    else:
        config, num_tokens = _eagle3(options, wanted, target)
    check_quantization(
        wanted.quantization,
        config,
        "speculative_config['quantization']",
        "speculative_config['model']",
    )
    _check_division(options, wanted, method)
    settled = {**(options.decoding.speculative_config or {}), "method": method}
    if num_tokens:
        settled["num_speculative_tokens"] = num_tokens
    if longest is not None:
        settled["max_model_len"] = longest
    return options.replace(speculative_config=settled)


def draft_config(options: EngineOptions, wanted: SpeculativeConfig) -> ModelConfig:
    """Of the model that `wanted` names; it is fetched if need be."""
    named = replace(options.model, model=wanted.model, revision=None, hf_overrides=None)
    return read_model(named)


def _check_vocabulary(config: ModelConfig, wanted: SpeculativeConfig, target: ModelConfig) -> None:
    """Models of one family have the same tokens, padded to different numbers."""
    if config.vocab_size == target.vocab_size:
        return
    ours, theirs = (read_vocabulary(one.source.path) for one in (config, target))
    shared = ours.keys() & theirs.keys()
    if shared and all(ours[index] == theirs[index] for index in shared):
        return
    reason = "and they cannot be compared without a tokenizer.json of each"
    if shared:
        index = next(index for index in sorted(shared) if ours[index] != theirs[index])
        reason = f"whose token {index} is {theirs[index]!r} and not {ours[index]!r}"
    raise OptionError(
        f"speculative_config['model']={wanted.model!r} has a vocabulary of {config.vocab_size} "
        f"tokens, {target.source.name} one of {target.vocab_size}, {reason}; use a smaller model "
        "of the same family."
    )


def mtp_config(target: ModelConfig) -> ModelConfig:
    """The target's configuration with the layer that predicts further tokens as its last one."""
    name = target.source.name
    if target.architecture not in MTP_ARCHITECTURES or not target.num_draft_layers:
        raise OptionError(
            f"speculative_config: method 'mtp' drafts with layers in the target's own checkpoint "
            f"(num_nextn_predict_layers in config.json), and {name} has none that are known; name "
            "another method, such as 'auto', or a model that drafts."
        )
    if target.num_draft_layers > 1:
        raise OptionError(
            f"speculative_config: {name} has num_nextn_predict_layers={target.num_draft_layers} "
            "layers that predict further tokens, and method 'mtp' knows checkpoints with 1; use "
            "method 'auto'."
        )
    if target.source.kind == "gguf":
        raise OptionError(
            f"speculative_config: method 'mtp' does not read GGUF files such as {name}; use "
            "method 'auto', or the original checkpoint."
        )
    experts = target.experts
    if experts is not None:
        experts = replace(experts, is_sparse=(*experts.is_sparse, True))
    return replace(
        target,
        architecture=MTP_ARCHITECTURES[target.architecture],
        num_layers=target.num_layers + 1,
        num_draft_layers=0,
        tie_word_embeddings=False,
        experts=experts,
    )


def eagle3_config(
    options: EngineOptions, wanted: SpeculativeConfig, target: ModelConfig
) -> tuple[ModelConfig, Eagle3Config]:
    """Of the head that `wanted` names, which must be one for the target."""
    config = draft_config(options, wanted)
    given, name = f"speculative_config['model']={wanted.model!r}", target.source.name
    if config.architecture != EAGLE3:
        raise OptionError(
            f"{given} is a {config.architecture}, not an EAGLE-3 head; leave 'method' out, or use "
            "'draft_model'."
        )
    eagle = Eagle3Config.of(config.values)
    if config.vocab_size != target.vocab_size:
        raise OptionError(
            f"{given} has a vocabulary of {config.vocab_size} tokens, {name} one of "
            f"{target.vocab_size}; use a head that was trained for this model."
        )
    if eagle.draft_vocab_size > config.vocab_size:
        raise OptionError(
            f"{given} has draft_vocab_size={eagle.draft_vocab_size}, more than its vocabulary of "
            f"{config.vocab_size}; check that config.json belongs to its weights."
        )
    if eagle.target_hidden_size != target.hidden_size:
        raise OptionError(
            f"{given} reads hidden states of {eagle.target_hidden_size} numbers, those of {name} "
            f"have {target.hidden_size}; use a head that was trained for this model."
        )
    layers = eagle.layers_of(target.num_layers)
    if not all(0 <= layer < target.num_layers for layer in layers):
        raise OptionError(
            f"{given} reads what enters the layers {', '.join(map(str, layers))}, and {name} has "
            f"{target.num_layers}; use a head that was trained for this model."
        )
    return config, eagle


def _method(options: EngineOptions, wanted: SpeculativeConfig, target: ModelConfig) -> str:
    if wanted.method == "mtp":
        mtp_config(target)  # refuses a target without
        if wanted.model is not None and not _is_target(options, wanted, target):
            raise OptionError(
                f"speculative_config['model']={wanted.model!r} is not the target "
                f"({target.source.name}), whose own layers method 'mtp' drafts with; leave 'model' "
                "out."
            )
        return "mtp"
    if wanted.method == "eagle3":
        return "eagle3"
    if _is_target(options, wanted, target):
        if wanted.is_measured:
            return "auto"
        has_layers = target.num_draft_layers and target.architecture in MTP_ARCHITECTURES
        return "mtp" if wanted.method == FROM_MODEL and has_layers else "draft_model"
    is_head = draft_config(options, wanted).architecture == EAGLE3
    if is_head and wanted.uses_model:
        raise OptionError(
            f"speculative_config['model']={wanted.model!r} is an EAGLE-3 head; use method 'eagle3'."
        )
    if wanted.is_measured:
        return "auto"
    return "eagle3" if is_head else "draft_model"


def _is_target(options: EngineOptions, wanted: SpeculativeConfig, target: ModelConfig) -> bool:
    if wanted.model in (options.model.model, str(target.source.path)):
        return True
    return wanted.model is not None and wanted.model == target.source.name


def _check_division(options: EngineOptions, wanted: SpeculativeConfig, method: str) -> None:
    """A head is divided as its target is, and so may a model be."""
    size, found = options.parallel.tensor_parallel_size, wanted.num_ranks
    if found in (None, size) or (found == 1 and method not in HEADS):
        return
    rule = f"tensor_parallel_size ({size}) for a head"
    if method not in HEADS:
        rule = f"1 or tensor_parallel_size ({size})"
    raise OptionError(
        f"speculative_config['draft_tensor_parallel_size'] must be {rule}, got {found!r}; leave it "
        "out."
    )


def _eagle3(
    options: EngineOptions, wanted: SpeculativeConfig, target: ModelConfig
) -> tuple[ModelConfig, int]:
    """Of the head, and how many tokens it drafts."""
    config, eagle = eagle3_config(options, wanted, target)
    num_tokens = wanted.num_tokens or eagle.num_tokens
    if num_tokens is None:
        raise OptionError(
            "speculative_config['num_speculative_tokens'] must be an integer of at least 1: the "
            f"configuration of {wanted.model!r} does not say for how many it was trained."
        )
    return config, num_tokens
