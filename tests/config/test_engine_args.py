"""`EngineArgs` as vLLM's scripts use it: made, changed, read from a script's own command line."""

from __future__ import annotations

import argparse
import dataclasses
import pickle

import pytest

from quire import AsyncEngineArgs, EngineArgs, EngineOptions, OptionError
from quire.config.options import option_groups


def test_fields_are_the_options() -> None:
    args = EngineArgs("a/model", max_model_len=128, dtype="half", hf_token="secret")
    assert [item.name for item in dataclasses.fields(args)] == list(option_groups())
    assert args.model == "a/model" and args.dtype == "float16" and args.seed == 0
    assert "secret" not in repr(args)
    assert args == EngineArgs(model="a/model", max_model_len=128, dtype="half", hf_token="secret")
    assert pickle.loads(pickle.dumps(args)) == args
    args.max_model_len = 64
    expected = EngineOptions.from_arguments(
        model="a/model", max_model_len=64, dtype="float16", hf_token="secret"
    )
    assert EngineOptions.from_arguments(**dataclasses.asdict(args)) == expected
    assert args.create_engine_config() == expected
    assert isinstance(AsyncEngineArgs(), EngineArgs)


def test_mistakes_are_those_of_llm() -> None:
    with pytest.raises(OptionError, match="Did you mean max_model_len"):
        EngineArgs(max_model_length=3)
    with pytest.raises(OptionError, match="enable_prompt_adapter=True is refused"):
        EngineArgs(enable_prompt_adapter=True)
    with pytest.warns(UserWarning, match="swap_space=4 has no effect"):
        EngineArgs(swap_space=4)
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = EngineArgs().no_such_field


@pytest.mark.parametrize("args_class", [EngineArgs, AsyncEngineArgs])
def test_a_scripts_own_command_line(args_class: type[EngineArgs]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-tokens", type=int, default=9)
    parser = args_class.add_cli_args(parser)
    parser.set_defaults(model="a/model")
    with pytest.warns(UserWarning, match="--swap-space has no effect"):
        words = ["--max-num-seqs", "3", "--swap-space", "4", "--pipeline-parallel-size", "1"]
        read = parser.parse_args(words)
    assert read.model == "a/model" and read.block_size == 16, "options are attributes, given or not"
    args = args_class.from_cli_args(read)
    assert type(args) is args_class
    assert args == args_class(model="a/model", max_num_seqs=3)
    values = vars(read)
    assert values.pop("max_tokens") == 9
    assert EngineOptions.from_arguments(**values) == args.create_engine_config()
