"""`quire quality`: what a quantised model costs, next to another one with the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.bench.divergence import Comparison, RecordedPredictions
from quire.bench.report import INK, Report, check_outputs, percent, publish
from quire.bench.sample_text import SAMPLE_TEXT
from quire.config.cli import Arguments, add_engine_arguments, engine_arguments
from quire.config.model import ModelConfig, read_model
from quire.config.options import EngineOptions, option_groups
from quire.protocol.errors import ModelError, OptionError
from quire.terminal import note, progress_line

if TYPE_CHECKING:
    from quire.config.cli import CommandParser
    from quire.text.tokenizer import Tokenizer

OF_THE_MODEL = ("dtype", "quantization", "kv_cache_dtype")
"""Options of MODEL's engine; BASE has its own."""
OF_ITS_FILES = (
    "model",
    "tokenizer",
    "revision",
    "tokenizer_revision",
    "hf_overrides",
    "load_format",
)
"""Those that say what is read, and so are not for another model."""
NOT_FOR_QUALITY = (
    *(name for name, group in option_groups().items() if group == "parallel"),
    *("model", "tokenizer", "seed", "skip_tokenizer_init", "chat_template", "generation_config"),
    *("max_logprobs", "scheduling_policy", "max_model_len", "enable_prefix_caching"),
)
NUM_TOKENS, WINDOW = 4096, 512
NUM_SHOWN = 8
TOKENS_AROUND = 12


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Compare what MODEL and BASE expect for each token of some text: perplexities, KL "
        "divergence of MODEL from BASE over the whole vocabulary, and the places that differ most. "
        "Engine flags are for both, but for --dtype, --quantization and --kv-cache-dtype, which "
        "are MODEL's. Exit status 1: the mean divergence is above --max-kl."
    )
    parser.add_argument(
        "model_word", nargs="?", metavar="MODEL", help="(default: the embedded model)"
    )
    section = parser.add_argument_group("quality")
    section.add_argument(
        "--against", metavar="BASE", help="A model of the same vocabulary. (default: MODEL itself)"
    )
    for name in OF_THE_MODEL:
        flag = name.replace("_", "-")
        section.add_argument(
            f"--against-{flag}", metavar="TEXT", help=f"As --{flag}, for BASE. (default: auto)"
        )
    section.add_argument(
        "--prompts",
        metavar="FILE",
        help="A text, or a .jsonl file with a prompt in each line. (default: a few built-in "
        "paragraphs)",
    )
    section.add_argument(
        "--tokens",
        type=int,
        default=NUM_TOKENS,
        metavar="N",
        help=f"Most tokens to look at. (default: {NUM_TOKENS})",
    )
    section.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="Tokens that are predicted from those before them: a text is cut into windows, "
        f"prompts end there. (default: {WINDOW}, or the context if that is shorter)",
    )
    section.add_argument(
        "--max-kl",
        type=float,
        metavar="X",
        help="Largest mean divergence that ends with status 0. (default: any)",
    )
    section.add_argument("--json", metavar="FILE", help="Write all figures to this file.")
    section.add_argument(
        "--plot", metavar="FILE", help="Draw the result into this file, such as out.png."
    )
    add_engine_arguments(parser, exclude=NOT_FOR_QUALITY)


@dataclass(frozen=True)
class Side:
    """One of the two models: how its engine is started, and what is known of it before that."""

    given: dict[str, Any]
    config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def of(cls, given: dict[str, Any]) -> Side:
        from quire.text.tokenizer import load_tokenizer

        config = read_model(EngineOptions.from_arguments(**given).model)
        return cls(given, config, load_tokenizer(config.source))

    def measure(self, window: int, run: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
        """What `run` makes of the engine, and the options that this has."""
        from quire import LLM

        own = {"enable_prefix_caching": False, "enforce_eager": True, "max_model_len": window + 1}
        with LLM(**{**own, **self.given}) as llm:
            flat = llm.options.flat()
            options = {name: flat[name] for name in (*OF_THE_MODEL, "device")}
            return run(llm), {"name": self.config.source.name, **options}


@dataclass(frozen=True)
class Subject:
    """The two models as JSON has them."""

    model: dict[str, Any]
    base: dict[str, Any]

    def described(self) -> dict[str, Any]:
        return {"model": self.model, "base": self.base}


def run(arguments: Arguments) -> int:
    check_outputs(arguments)
    model, base = _sides(arguments)
    windows = _windows(arguments, model, base)
    longest = max(map(len, windows))
    with progress_line(True) as progress:
        recorded = RecordedPredictions(windows, base.config.vocab_size)
        _, base_options = base.measure(longest, lambda llm: recorded.record(llm, progress))
        found, model_options = model.measure(longest, lambda llm: recorded.compare(llm, progress))
    subject = Subject(model_options, base_options)
    figures = _figures(found, windows, model.tokenizer)
    publish(_report(figures, subject), arguments, subject)
    # Negated, for a divergence that is no number.
    if arguments.max_kl is not None and not figures["kl_mean"] <= arguments.max_kl:
        note(
            f"quire quality: the mean divergence, {figures['kl_mean']:.3g}, is not within --max-kl "
            f"{arguments.max_kl:g}."
        )
        return 1
    return 0


def _sides(arguments: Arguments) -> tuple[Side, Side]:
    given = engine_arguments(arguments)
    if arguments.model_word is not None:
        given["model"] = arguments.model_word
    left_out = (*OF_THE_MODEL, *(OF_ITS_FILES if arguments.against is not None else ()))
    for_base = {name: value for name, value in given.items() if name not in left_out}
    if arguments.against is not None:
        for_base["model"] = arguments.against
    for name in OF_THE_MODEL:
        value = getattr(arguments, f"against_{name}")
        if value is not None:
            for_base[name] = value
    if given == for_base:
        raise OptionError(
            "the base is the model itself, so that nothing would be compared; name another with "
            "--against, or what differs by --quantization, --dtype or --kv-cache-dtype."
        )
    model, base = Side.of(given), Side.of(for_base)
    if model.config.vocab_size != base.config.vocab_size:
        raise ModelError(
            f"{model.config.source.name} has {model.config.vocab_size} tokens and "
            f"{base.config.source.name} {base.config.vocab_size}; only models with the same "
            "vocabulary can be compared."
        )
    return model, base


def _windows(arguments: Arguments, model: Side, base: Side) -> list[list[int]]:
    from quire.text.prompts import cut_text, read_windows

    longest = min(side.config.max_position_tokens for side in (model, base)) - 1
    window = min(WINDOW, longest) if arguments.window is None else arguments.window
    for name, value in (("tokens", arguments.tokens), ("window", window)):
        if value < 2:
            raise OptionError(f"--{name} must be at least 2, got {value}.")
    if window > longest:
        raise OptionError(
            f"--window {window} is too long for a context of {longest + 1} tokens; use at most "
            f"{longest}."
        )
    size = min(window, arguments.tokens)

    def windows(tokenizer: Tokenizer) -> list[list[int]]:
        if arguments.prompts is None:
            return cut_text(SAMPLE_TEXT, tokenizer, size, arguments.tokens)
        path = Path(arguments.prompts).expanduser()
        return read_windows(path, "--prompts", tokenizer, size, arguments.tokens)

    found = windows(model.tokenizer)
    if found != windows(base.tokenizer):
        raise ModelError(
            f"the tokenizers of {model.config.source.name} and {base.config.source.name} make "
            "different tokens of the same text, so that their predictions cannot be compared."
        )
    return found


def _figures(found: Comparison, windows: list[list[int]], tokenizer: Tokenizer) -> dict[str, Any]:
    divergences = found.divergences
    places = [
        (number, position)
        for number, window in enumerate(windows)
        for position in range(1, len(window))
    ]
    shown = []
    for line in np.argsort(-divergences)[:NUM_SHOWN].tolist():
        number, position = places[line]
        window = windows[number]
        first = max(0, position - TOKENS_AROUND)
        shown.append(
            {
                "text": number,
                "position": position,
                "kl": float(divergences[line]),
                "before": tokenizer.decode(window[first:position]),
                "token": tokenizer.decode([window[position]]),
                **{
                    f"{side}_{name}": value
                    for side, made in (("base", found.base), ("model", found.model))
                    for name, value in (
                        ("expects", tokenizer.decode([int(made.likeliest[line])])),
                        ("probability", float(made.likelihoods[line])),
                    )
                },
            }
        )
    return {
        "texts": len(windows),
        "tokens": len(divergences),
        "perplexity": found.model.perplexity,
        "base_perplexity": found.base.perplexity,
        "kl_mean": float(divergences.mean()),
        "kl_p99": float(np.percentile(divergences, 99)),
        "kl_max": float(divergences.max()),
        "same_top1": found.same_top1,
        "differ_most": shown,
        "kl": divergences.tolist(),
        "losses": found.model.losses.tolist(),
        "base_losses": found.base.losses.tolist(),
    }


def _report(figures: dict[str, Any], subject: Subject) -> Report:
    change = figures["perplexity"] / figures["base_perplexity"] - 1
    rows = [
        (
            "perplexity",
            f"{figures['perplexity']:.4f}",
            f"{figures['base_perplexity']:.4f}",
            f"{100 * change:+.2f} %",
        ),
        ("KL divergence per token, mean", f"{figures['kl_mean']:.5f}", "", ""),
        ("KL divergence per token, p99", f"{figures['kl_p99']:.5f}", "", ""),
        ("same most likely token", percent(figures["same_top1"]), "", ""),
    ]
    notes = [
        f"model: {_described(subject.model)}",
        f"base:  {_described(subject.base)}",
        f"{figures['tokens']} tokens of {figures['texts']} texts or windows. KL divergence of the "
        "model from the base, over the whole vocabulary, in nats.",
        "",
        "Where they differ most:",
        *map(_line, figures["differ_most"]),
    ]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        ordered = np.sort(figures["kl"])[::-1].clip(1e-9)
        left.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), color=INK[0])
        left.axvline(max(figures["kl_mean"], 1e-9), color=INK[1], linestyle="--", label="mean")
        left.set(xscale="log", yscale="log", xlabel="KL divergence", ylabel="share of tokens above")
        left.legend(frameon=False)
        base, model = (-np.array(figures[name]) for name in ("base_losses", "losses"))
        right.plot(base, model, ".", color=INK[0], markersize=2)
        lowest = float(min(base.min(), model.min()))
        right.plot([lowest, 0], [lowest, 0], color=INK[1], linewidth=0.8)
        right.set(xlabel="base", ylabel="model", title="log-probability of each token")

    title = f"{subject.model['name']} against {subject.base['name']}"
    header = ("", "model", "base", "difference")
    return Report("quality", title, header, rows, notes, figures, draw)


def _described(side: dict[str, Any]) -> str:
    parts = [side["dtype"], side["quantization"], f"KV cache {side['kv_cache_dtype']}"]
    return f"{side['name']} ({', '.join(part for part in parts if part)}, {side['device']})"


def _line(place: dict[str, Any]) -> str:
    before, token = (" ".join(repr(place[name])[1:-1].split("\\n")) for name in ("before", "token"))
    expected = ", ".join(
        f"{side} {place[f'{side}_expects']!r} {place[f'{side}_probability']:.0%}"
        for side in ("base", "model")
    )
    return f"  {place['kl']:.3f}  ...{before}[{token}]  {expected}"
