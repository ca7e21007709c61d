"""The command line is generated from the declarations: every option has a flag that reads back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from quire.config.arguments import IGNORED, REFUSED, SWITCHES
from quire.config.cli import (
    SAMPLING_HELP,
    Arguments,
    CommandParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_options,
    sampling_arguments,
)
from quire.config.options import EngineOptions, option_groups
from quire.protocol.errors import OptionError
from quire.protocol.sampling import RepetitionDetectionParams, SamplingParams

# For every option a command line and the value it must give.
ENGINE_FLAGS: dict[str, tuple[str, Any]] = {
    "model": ("--model=a/b", "a/b"),
    "tokenizer": ("--tokenizer=t", "t"),
    "skip_tokenizer_init": ("--skip-tokenizer-init", True),
    "revision": ("--revision=v1", "v1"),
    "tokenizer_revision": ("--tokenizer-revision=v2", "v2"),
    "hf_token": ("--hf-token=secret", "secret"),
    "download_dir": ("--download-dir=d", "d"),
    "hf_overrides": ('--hf-overrides={"rope_theta": 5}', {"rope_theta": 5}),
    "chat_template": ("--chat-template=x.jinja", "x.jinja"),
    "dtype": ("--dtype=half", "float16"),
    "quantization": ("--quantization=awq", "awq"),
    "load_format": ("--load-format=dummy", "dummy"),
    "seed": ("--seed=3", 3),
    "max_model_len": ("--max-model-len=auto", -1),
    "generation_config": ("--generation-config=vllm", "vllm"),
    "max_logprobs": ("--max-logprobs=5", 5),
    "block_size": ("--block-size=32", 32),
    "gpu_memory_utilization": ("--gpu-memory-utilization=0.5", 0.5),
    "kv_cache_memory_bytes": ("--kv-cache-memory-bytes=2GiB", 2 << 30),
    "num_gpu_blocks_override": ("--num-gpu-blocks-override=9", 9),
    "enable_prefix_caching": ("--no-enable-prefix-caching", False),
    "kv_cache_dtype": ("--kv-cache-dtype=half", "float16"),
    "max_num_seqs": ("--max-num-seqs=4", 4),
    "max_num_batched_tokens": ("--max-num-batched-tokens=64", 64),
    "scheduling_policy": ("--scheduling-policy=priority", "priority"),
    "enable_chunked_prefill": ("--no-enable-chunked-prefill", False),
    "max_steps_in_flight": ("--max-steps-in-flight=2", 2),
    "long_prefill_token_threshold": ("--long-prefill-token-threshold=128", 128),
    "target_itl_ms": ("--target-itl-ms=40", 40.0),
    "max_num_queued_reqs": ("--max-num-queued-reqs=64", 64),
    "max_num_queued_tokens": ("--max-num-queued-tokens=4096", 4096),
    "reservation": ("--reservation=max_length", "max_length"),
    "device": ("--device=cpu", "cpu"),
    "attention_backend": ("--attention-backend=torch", "torch"),
    "enforce_eager": ("--enforce-eager", True),
    "disable_cascade_attn": ("--disable-cascade-attn", True),
    "num_threads": ("--num-threads=2", 2),
    "tensor_parallel_size": ("--tensor-parallel-size=2", 2),
    "pipeline_parallel_size": ("--pipeline-parallel-size=2", 2),
    "enable_expert_parallel": ("--enable-expert-parallel", True),
    "distributed_executor_backend": ("--distributed-executor-backend=ray", "ray"),
    "nnodes": ("--nnodes=2", 2),
    "node_rank": ("--node-rank=1", 1),
    "master_addr": ("--master-addr=10.0.0.1", "10.0.0.1"),
    "master_port": ("--master-port=4000", 4000),
    "distributed_timeout_seconds": ("--distributed-timeout-seconds=60", 60),
    "structured_outputs_config": (
        '--structured-outputs-config={"jump_ahead": false}',
        {"jump_ahead": False},
    ),
    "speculative_config": ('--speculative-config={"method": "auto"}', {"method": "auto"}),
    "enable_lora": ("--enable-lora", True),
    "max_loras": ("--max-loras=4", 4),
    "max_lora_rank": ("--max-lora-rank=64", 64),
    "max_cpu_loras": ("--max-cpu-loras=9", 9),
    "disable_log_stats": ("--no-disable-log-stats", False),
    "log_level": ("--log-level=debug", "DEBUG"),
}

SAMPLING_FLAGS: dict[str, tuple[list[str], Any]] = {
    "n": (["--n=2"], 2),
    "temperature": (["--temperature=0.5"], 0.5),
    "top_p": (["--top-p=0.9"], 0.9),
    "top_k": (["--top-k=40"], 40),
    "min_p": (["--min-p=0.1"], 0.1),
    "presence_penalty": (["--presence-penalty=0.5"], 0.5),
    "frequency_penalty": (["--frequency-penalty=-0.5"], -0.5),
    "repetition_penalty": (["--repetition-penalty=1.1"], 1.1),
    "seed": (["--seed=7"], 7),
    "stop": (["--stop", "\n", "--stop", "END"], ["\n", "END"]),
    "stop_token_ids": (["--stop-token-ids=1,2"], [1, 2]),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "ignore_eos": (["--ignore-eos"], True),
    "max_tokens": (["--max-tokens=9"], 9),
    "min_tokens": (["--min-tokens=3"], 3),
    "bad_words": (["--bad-words", "no way"], ["no way"]),
    "allowed_token_ids": (["--allowed-token-ids=5"], [5]),
    "logit_bias": (["--logit-bias", '{"42": -5}'], {42: -5.0}),
    "repetition_detection": (
        ["--repetition-detection", '{"max_pattern_size": 8}'],
        RepetitionDetectionParams(8),
    ),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "spaces_between_special_tokens": (["--no-spaces-between-special-tokens"], False),
    "speculation": (["--no-speculation"], False),
    "skip_reading_prefix_cache": (["--skip-reading-prefix-cache"], True),
}


def read(*words: str) -> Arguments:
    parser = CommandParser(prog="quire test")
    add_sampling_arguments(parser, 128)
    add_engine_arguments(parser, exclude=("seed",))
    return parser.read(words)


def read_engine(*words: str) -> EngineOptions:
    parser = CommandParser(prog="quire test")
    add_engine_arguments(parser)
    return engine_options(parser.read(words))


def test_every_option_has_a_flag() -> None:
    """An option declared without thinking of its flag shows up here."""
    assert list(ENGINE_FLAGS) == list(option_groups())


@pytest.mark.parametrize("name", ENGINE_FLAGS)
def test_engine_flags_read_back(name: str) -> None:
    """A flag changes its option, and no other."""
    flag, value = ENGINE_FLAGS[name]
    assert read_engine(flag) == EngineOptions().replace(**{name: value})
    if "=" in flag:
        assert read_engine(*flag.split("=", 1)) == read_engine(flag)


def test_no_flags_are_the_defaults() -> None:
    """The command line has no defaults of its own."""
    assert read_engine() == EngineOptions()
    assert sampling_arguments(read()) == {}


def test_every_sampling_parameter_with_help_has_a_flag() -> None:
    assert set(SAMPLING_FLAGS) == set(SAMPLING_HELP)


@pytest.mark.parametrize("name", SAMPLING_FLAGS)
def test_sampling_flags_read_back(name: str) -> None:
    """A flag changes its parameter, and no other."""
    words, value = SAMPLING_FLAGS[name]
    given = sampling_arguments(read(*words))
    assert list(given) == [name]
    assert getattr(SamplingParams(**given), name) == value


def test_underscores_are_dashes() -> None:
    """vLLM takes both; values and what follows `--` stay as they are."""
    parser = CommandParser(prog="quire test")
    parser.add_argument("words", nargs="*")
    add_engine_arguments(parser)
    arguments = parser.read(["--max_num_seqs", "3", "--model=a_b", "--", "--not_a_flag"])
    assert engine_options(arguments) == EngineOptions().replace(max_num_seqs=3, model="a_b")
    assert arguments.words == ["--not_a_flag"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--max-num-sequences=3"],
            "unknown flag --max-num-sequences. Did you mean --max-num-seqs",
        ),
        (["-n", "3"], "unknown flag -n. Did you mean --n?"),
        (["--xyzzy=3"], "unknown flag --xyzzy (see `quire test --help`)"),
        (["--data-parallel-size", "2"], "--data-parallel-size is refused: data parallelism"),
        (["--enable-prompt-adapter"], "--enable-prompt-adapter is refused: such adapters"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs: invalid int value: 'many'"),
        (["--hf-overrides", "{"], "argument --hf-overrides: '{' is not JSON"),
        (["--stop-token-ids", "a"], "argument --stop-token-ids: 'a' is not a list of ids"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_mistakes_end_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and one line on standard error that says what to do."""
    with pytest.raises(SystemExit) as raised:
        read(*words)
    assert raised.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"quire: error: {message}")
    assert captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("name", [*IGNORED, *REFUSED])
def test_what_python_accepts_the_command_line_accepts(name: str) -> None:
    """One table for both: a warning with the same reason, or silence where nothing is asked for."""
    flag, is_switch = "--" + name.replace("_", "-"), name in SWITCHES
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if name in IGNORED:
            arguments = read(*([flag] if is_switch else [flag, "4"]))
        elif is_switch:
            arguments = read("--no-" + flag[2:])
        else:
            neutral = [value for value in REFUSED[name].neutral[1:] if not isinstance(value, set)]
            arguments = read(flag, str(neutral[0] if neutral else None).replace("()", "[]"))
    told = [str(warning.message) for warning in caught]
    assert told == ([f"{flag} has no effect: {IGNORED[name]}."] if name in IGNORED else [])
    assert engine_options(arguments) == EngineOptions()


def test_switches_take_no_word_away() -> None:
    parser = CommandParser(prog="quire test")
    parser.add_argument("words", nargs="*")
    add_engine_arguments(parser)
    with pytest.warns(UserWarning, match="code that comes with a model is never run"):
        assert parser.read(["--trust-remote-code", "a prompt"]).words == ["a prompt"]


def test_flags_may_be_left_out_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """What a command cannot use is not in its help, and the reason is not "unknown"."""
    parser = CommandParser(prog="quire test")
    add_sampling_arguments(parser, exclude=("n",))
    add_engine_arguments(parser, exclude=("seed", "max_logprobs"))
    assert "--max-logprobs" not in parser.format_help() and "--n " not in parser.format_help()
    for flag in ("--n", "--max-logprobs"):
        with pytest.raises(SystemExit):
            parser.read([flag, "3"])
        assert f"{flag} is of no use to `quire test`" in capsys.readouterr().err


def test_values_are_checked_where_they_are_declared() -> None:
    """The command line and the Python API give the same error."""
    with pytest.raises(OptionError, match="block_size must be a power of two from 4 to 128, got 3"):
        read_engine("--block-size", "3")


def test_help_names_every_option_with_its_default() -> None:
    """Help is written once, in the declaration."""
    parser = CommandParser(prog="quire test")
    add_engine_arguments(parser)
    text = " ".join(parser.format_help().split())
    for name in option_groups():
        assert f"--{name.replace('_', '-')}" in text
    assert text.count("(default: ") == len(option_groups())
    assert "Tokens per block. (default: 16)" in text


def test_help_of_sampling_parameters() -> None:
    """Each has its default, said in words where it is not a number."""
    parser = CommandParser(prog="quire test")
    add_sampling_arguments(parser, 128)
    text = " ".join(parser.format_help().split())
    assert text.count("(default: ") == len(SAMPLING_HELP)
    assert "Most tokens to generate. (default: 128)" in text
    assert "even if its prefix is cached. (default: no)" in text


def test_help_keeps_indented_lines() -> None:
    """Examples are shown as they are typed; prose is wrapped."""
    prose = "word " * 40
    parser = CommandParser(prog="quire test", epilog=f"{prose}\n  quire generate x  --n 2")
    lines = parser.format_help().splitlines()
    assert lines[-1] == "  quire generate x  --n 2"
    assert max(map(len, lines)) < len(prose)
