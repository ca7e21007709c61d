"""Adapters through the whole engine, against peft: tokens, logprobs, vectors, beside whatever else
an engine does with a request."""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.engine.executors import launch
from quire.lora.request import LoRARequest
from quire.protocol.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.server.preparation.adapter_names import AdapterNames, AdapterSettings, reference_to
from tests.frontend.conftest import Tiny
from tests.models.reference import random_tokens, save_safetensors
from tests.tiny import assert_at_rest, greedy, save_tokenizer, tiny_llm

SETTINGS: dict[str, dict[str, Any]] = {
    "a": {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "b": {"r": 20, "target_modules": "all-linear", "alpha_pattern": {"q_proj": 3}},
    "c": {"r": 4, "target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
    "d": {"r": 4, "target_modules": ["gate_proj", "lm_head", "embed_tokens"]},
}
NAMES = (None, *SETTINGS)
PROMPTS = [random_tokens(length, seed=length) for length in (40, 9, 23)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@dataclass
class Adapted:
    folder: Path
    """Of all adapters."""
    models: dict[str | None, PreTrainedModel]
    """With an adapter merged; None: the base."""

    def request(self, name: str | None) -> LoRARequest | None:
        if name is None:
            return None
        return LoRARequest(name, 1 + list(SETTINGS).index(name), str(self.folder / name))

    def greedy(self, name: str | None, prompts: list[list[int]], count: int) -> list[list[int]]:
        return greedy(self.models[name], prompts, count)


def save_adapter(base: PreTrainedModel, folder: Path, seed: int, **settings: Any) -> Any:
    """A random adapter; returns the model that has it merged."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            with torch.no_grad():
                parameter.normal_(0.0, 0.2, generator=generator)
    model.save_pretrained(str(folder))
    return model.merge_and_unload()


@pytest.fixture(scope="module")
def adapted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapters")
    models: dict[str | None, PreTrainedModel] = {None: tiny.model}
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        models[name] = save_adapter(tiny.model, folder / name, seed, **settings)
    return Adapted(folder, models)


@pytest.fixture(scope="module")
def llm(tiny: Tiny, adapted: Adapted) -> Iterator[LLM]:
    with adapters_llm(tiny) as engine:
        yield engine
        assert_at_rest(engine)


@pytest.fixture(scope="module")
def merged(adapted: Adapted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine for the model with adapter b merged."""
    folder = tmp_path_factory.mktemp("merged")
    save_safetensors(adapted.models["b"], folder)
    save_tokenizer(folder)
    with tiny_llm(folder) as engine:
        yield engine


def adapters_llm(tiny: Tiny, **options: Any) -> LLM:
    settings = {"max_loras": 3, "max_lora_rank": 24, "max_cpu_loras": 9, **options}
    return tiny_llm(tiny.folder, enable_lora=True, **settings)


def made(
    llm: LLM,
    adapted: Adapted,
    prompts: list[list[int]],
    names: list[str | None],
    params: SamplingParams = GREEDY,
) -> list[list[int]]:
    requests = [adapted.request(name) for name in names]
    outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
    assert [output.lora_request for output in outputs] == requests
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_gpu_blocks_override": 24, "block_size": 4, "max_model_len": 64},
        {"max_loras": 1, "max_cpu_loras": 1},
        {"enable_prefix_caching": False, "max_steps_in_flight": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"attention_backend": "torch"},
    ],
    ids=["plain", "chunks", "preemption", "one-slot", "in-flight", "drafts", "torch"],
)
def test_a_batch_of_all_adapters_is_what_peft_says(
    tiny: Tiny, adapted: Adapted, options: dict[str, Any]
) -> None:
    """Twice: the second time prefixes are cached."""
    prompts = [prompt for prompt in PROMPTS for _ in NAMES]
    names = [name for _ in PROMPTS for name in NAMES]
    expected = {name: adapted.greedy(name, PROMPTS, 12) for name in NAMES}
    wanted = [expected[name][i] for i in range(len(PROMPTS)) for name in NAMES]
    with adapters_llm(tiny, **options) as llm:
        for _ in range(2):
            assert made(llm, adapted, prompts, list(names)) == wanted
        if "num_gpu_blocks_override" in options:
            assert llm.statistics().num_preemptions > 0
        if not options:
            assert llm.statistics().hit_rate > 0.4
        assert_at_rest(llm)


def test_logprobs(llm: LLM, merged: LLM, adapted: Adapted) -> None:
    """Of the prompt, too, whose lines come from the adapted head."""
    params = SamplingParams(
        temperature=0.0, max_tokens=6, logprobs=4, prompt_logprobs=2, ignore_eos=True
    )
    (own,) = llm.generate(PROMPTS[0], params, lora_request=adapted.request("b"), use_tqdm=False)
    (reference,) = merged.generate(PROMPTS[0], params, use_tqdm=False)
    assert own.outputs[0].token_ids == reference.outputs[0].token_ids
    lines = zip(
        [*own.prompt_logprobs[1:], *own.outputs[0].logprobs],
        [*reference.prompt_logprobs[1:], *reference.outputs[0].logprobs],
        strict=True,
    )
    for one, other in lines:
        assert one.keys() == other.keys()
        for token in one:
            assert abs(one[token].logprob - other[token].logprob) < 1e-4


@pytest.mark.parametrize("name", ["c", "d"])
def test_prompt_logprobs_of_an_adapted_head(llm: LLM, adapted: Adapted, name: str) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (own,) = llm.generate(PROMPTS[2], params, lora_request=adapted.request(name), use_tqdm=False)
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        lines = adapted.models[name](ids).logits[0].double().log_softmax(-1)
    for position, line in enumerate(own.prompt_logprobs[1:]):
        token = PROMPTS[2][position + 1]
        assert abs(line[token].logprob - float(lines[position, token])) < 1e-4


def test_samples_forks_and_beams(llm: LLM, merged: LLM, adapted: Adapted) -> None:
    request = adapted.request("b")
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    (own,) = llm.generate(PROMPTS[0], params, lora_request=request, use_tqdm=False)
    (reference,) = merged.generate(PROMPTS[0], params, use_tqdm=False)
    assert [one.token_ids for one in own.outputs] == [one.token_ids for one in reference.outputs]
    assert all(one.lora_request == request for one in own.outputs)
    beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[1]}
    (own_beams,) = llm.beam_search([prompt], beams, lora_request=request)
    (reference_beams,) = merged.beam_search([prompt], beams)
    assert [one.tokens for one in own_beams.sequences] == [
        one.tokens for one in reference_beams.sequences
    ]


def test_structured_output_and_vectors(llm: LLM, merged: LLM, adapted: Adapted) -> None:
    request = adapted.request("b")
    outputs = StructuredOutputsParams(regex=r"[a-f]{4}-[0-9]{2}")
    params = SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=outputs)
    (own,) = llm.generate(PROMPTS[0], params, lora_request=request, use_tqdm=False)
    (reference,) = merged.generate(PROMPTS[0], params, use_tqdm=False)
    assert own.outputs[0].text == reference.outputs[0].text
    both = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    vectors = llm.embed(both, lora_request=[None, request], use_tqdm=False)
    (vector,) = merged.embed(both[1:], use_tqdm=False)
    distance = torch.tensor(vectors[1].outputs.embedding) - torch.tensor(vector.outputs.embedding)
    assert distance.abs().max() < 1e-4
    (base,) = llm.embed(both[1:], use_tqdm=False)
    assert base.outputs.embedding != vectors[1].outputs.embedding


def test_chats_and_streams(llm: LLM, adapted: Adapted) -> None:
    request = adapted.request("a")
    messages = [{"role": "user", "content": "Why?"}]
    (chat,) = llm.chat(messages, GREEDY, lora_request=request, use_tqdm=False)
    (expected,) = adapted.greedy("a", [chat.prompt_token_ids], 12)
    assert chat.outputs[0].token_ids == expected
    *_, last = llm.stream_chat(messages, GREEDY, lora_request=request)
    assert last.lora_request == request
    ids = llm.enqueue(PROMPTS[:1], GREEDY, lora_request=request)
    assert [one.request_id for one in llm.wait_for_completion(use_tqdm=False)] == ids


def test_new_weights_under_the_same_name(
    tiny: Tiny, adapted: Adapted, llm: LLM, tmp_path: Path
) -> None:
    """Blocks of the old weights are not used; those of equal weights elsewhere are."""
    folder = tmp_path / "sql"
    shutil.copytree(adapted.folder / "a", folder)
    request = LoRARequest("sql", 77, str(folder))
    expected = {name: adapted.greedy(name, PROMPTS[:1], 12)[0] for name in "ab"}

    def run() -> tuple[list[int], int | None]:
        (output,) = llm.generate(PROMPTS[0], GREEDY, lora_request=request, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    llm.reset_prefix_cache()
    made(llm, adapted, PROMPTS[:1], ["a"])
    tokens, num_cached = run()
    assert tokens == expected["a"] and num_cached == len(PROMPTS[0]) - 1
    shutil.rmtree(folder)
    shutil.copytree(adapted.folder / "b", folder)
    assert run() == (expected["b"], 0)
    assert run()[1] == len(PROMPTS[0]) - 1


def test_loading_and_unloading(llm: LLM, adapted: Adapted) -> None:
    request = adapted.request("a")
    assert request is not None
    for number in llm.list_loras():
        llm.remove_lora(number)
    assert llm.list_loras() == set()
    assert llm.add_lora(request) and llm.list_loras() == {1}
    assert llm.pin_lora(1)
    assert llm.remove_lora(1) and not llm.remove_lora(1)
    assert llm.list_loras() == set()
    with pytest.raises(RequestError, match="lora_int_id=5 cannot be pinned"):
        llm.pin_lora(5)


def test_what_cannot_be_used(tiny: Tiny, llm: LLM, adapted: Adapted, tmp_path: Path) -> None:
    """An error that says why, and the engine goes on."""

    def refuses(match: str, request: Any, **more: Any) -> None:
        with pytest.raises(RequestError, match=match):
            llm.generate(PROMPTS[:2], GREEDY, lora_request=request, use_tqdm=False, **more)

    refuses("lora_request must be a LoRARequest", "a")
    refuses("lora_request has 1 entries for 2 prompts", [adapted.request("a")])
    refuses(r"lora_request\[1\]", [None, 3])
    refuses("is not a folder", LoRARequest("x", 1, str(tmp_path / "nowhere")))
    save_adapter(tiny.model, tmp_path / "large", 0, r=32, target_modules=["q_proj"])
    refuses("rank 32, but max_lora_rank is 24", LoRARequest("large", 1, str(tmp_path / "large")))
    config = copy.deepcopy(tiny.model.config)
    config.num_hidden_layers = 4
    deeper = type(tiny.model)(config)
    save_adapter(deeper, tmp_path / "deep", 0, r=8, target_modules=["q_proj"])
    refuses(r"'deep'.*layers\.3\.self_attn", LoRARequest("deep", 1, str(tmp_path / "deep")))
    save_adapter(tiny.model, tmp_path / "huge", 0, r=8, target_modules=["q_proj"])
    file = tmp_path / "huge" / "adapter_model.safetensors"
    save_file({name: tensor * 1e30 for name, tensor in load_file(file).items()}, file)
    refuses(
        r"'huge': .*huge/adapter_model\.safetensors: .*q_proj: lora_B lora_A",
        LoRARequest("huge", 1, str(tmp_path / "huge")),
    )
    with tiny_llm(tiny.folder) as plain, pytest.raises(RequestError, match="enable_lora=True"):
        plain.generate(PROMPTS[0], GREEDY, lora_request=adapted.request("a"), use_tqdm=False)
    assert made(llm, adapted, PROMPTS[:1], ["a"]) == adapted.greedy("a", PROMPTS[:1], 12)


def test_only_what_was_read_anew_counts_as_such(
    tiny: Tiny, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many adapters in one call only some are loaded before it begins, and one name may stand
    for two folders."""
    with adapters_llm(tiny, max_loras=1, max_lora_rank=24, max_cpu_loras=2) as llm:
        loaded = []
        add = llm.add_lora
        monkeypatch.setattr(llm, "add_lora", lambda one: loaded.append(one) or add(one))
        folders = [str(adapted.folder / name) for name in ("a", "c", "d", "a")]
        wanted = [LoRARequest("x", 7, path, load_inplace=True) for path in folders]
        found = llm._loaded_adapters(wanted, 4)
        assert [one.lora_path for one in loaded] == folders[:2]
        assert [one.load_inplace for one in found] == [False, False, True, False]


def test_an_adapter_that_is_loaded_outlives_its_folder(
    llm: LLM, adapted: Adapted, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapted.folder / "a", tmp_path / "a")
    request = LoRARequest("gone", 8, str(folder))
    assert llm.add_lora(request)
    shutil.rmtree(folder)
    outputs = llm.generate(PROMPTS[0], GREEDY, lora_request=request, use_tqdm=False)
    assert [outputs[0].outputs[0].token_ids] == adapted.greedy("a", PROMPTS[:1], 12)
    assert llm.remove_lora(8)


def test_asyncio(tiny: Tiny, adapted: Adapted, tmp_path: Path) -> None:
    """A bad adapter costs its own request alone."""

    async def last(engine: AsyncLLM, prompt: list[int], request: LoRARequest | None) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(prompt, GREEDY, lora_request=request):
            tokens = output.outputs[0].token_ids
        return tokens

    async def run() -> None:
        engine = AsyncLLM(
            str(tiny.folder),
            enable_lora=True,
            max_loras=2,
            max_lora_rank=24,
            num_threads=1,
            kv_cache_memory_bytes="32MiB",
        )
        try:
            good = [last(engine, PROMPTS[0], adapted.request(name)) for name in NAMES]
            bad = last(engine, PROMPTS[0], LoRARequest("x", 9, str(tmp_path / "nowhere")))
            *results, error = await asyncio.gather(*good, bad, return_exceptions=True)
            expected = [adapted.greedy(name, PROMPTS[:1], 12)[0] for name in NAMES]
            assert results == expected
            assert isinstance(error, RequestError) and "is not a folder" in str(error)
            request = adapted.request("a")
            assert request is not None
            assert await engine.add_lora(request) and 1 in await engine.list_loras()
            assert await engine.pin_lora(1) and await engine.remove_lora(1)
            with pytest.raises(RequestError, match="is not a folder"):
                await engine.add_lora(LoRARequest("x", 9, str(tmp_path / "nowhere")))
        finally:
            engine.shutdown()

    asyncio.run(run())


@pytest.mark.slow
def test_a_thousand_adapters(tiny: Tiny, tmp_path: Path) -> None:
    """Requests drawn by Zipf over a thousand folders of different content: no error, none starves,
    and each has its own weights."""
    save_adapter(tiny.model, tmp_path / "0", 0, r=8, target_modules=["q_proj", "down_proj"])
    tensors = load_file(tmp_path / "0" / "adapter_model.safetensors")
    config = (tmp_path / "0" / "adapter_config.json").read_text("utf-8")
    for i in range(1, 1000):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "adapter_config.json").write_text(config, "utf-8")
        changed = {name: tensor * (1 + i / 100) for name, tensor in tensors.items()}
        save_file(changed, tmp_path / str(i) / "adapter_model.safetensors")
    random = Random(0)
    drawn = random.choices(range(1000), [1 / (i + 1) for i in range(1000)], k=400)
    names = AdapterNames(AdapterSettings(folder=str(tmp_path)))  # of --lora-folder
    assert len(names.all()) == 1000
    modules = [names.find(str(i)) for i in drawn]
    requests = [reference_to(module) for module in modules if module is not None]
    prompts = [random_tokens(6, seed=i) for i in range(len(drawn))]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with adapters_llm(tiny, max_loras=4, max_lora_rank=8, max_cpu_loras=64) as llm:
        outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
        values = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        assert_at_rest(llm)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert values["quire:adapter_device_queries"] == 400
    assert values["quire:adapter_device_hits"] > 150 and values["quire:adapter_host_hits"] > 100
    for place in random.sample(range(400), 5):
        folder = requests[place].lora_path
        model = peft.PeftModel.from_pretrained(copy.deepcopy(tiny.model), folder).eval()
        (expected,) = greedy(model.merge_and_unload(), [prompts[place]], 4)
        assert outputs[place].outputs[0].token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "way"),
    [(2, 1, "memory"), (1, 2, "memory"), (2, 2, "memory"), (2, 1, "gloo")],
)
def test_ranks(
    tiny: Tiny,
    adapted: Adapted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tp: int,
    pp: int,
    way: str,
) -> None:
    """Each rank has its share; with few blocks sequences are preempted. What one rank refuses costs
    its own request alone."""
    if way == "gloo":  # as between hosts
        monkeypatch.setattr(launch, "share_memory", lambda device: False)
    prompts = [prompt for prompt in PROMPTS for _ in NAMES]
    names = [name for _ in PROMPTS for name in NAMES]
    wanted = [
        adapted.greedy(name, [prompt], 12)[0] for prompt, name in zip(prompts, names, strict=True)
    ]
    config = copy.deepcopy(tiny.model.config)
    config.num_hidden_layers = 4
    save_adapter(type(tiny.model)(config), tmp_path / "deep", 0, r=8, target_modules=["q_proj"])
    options = {"block_size": 4, "num_gpu_blocks_override": 40, "max_model_len": 64}
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    with adapters_llm(tiny, max_loras=2, **options, **sizes) as llm:
        for _ in range(2):
            assert made(llm, adapted, prompts, list(names)) == wanted
            with pytest.raises(RequestError, match=r"'deep'.*layers\.3\.self_attn"):
                request = LoRARequest("deep", 9, str(tmp_path / "deep"))
                llm.generate(PROMPTS[0], GREEDY, lora_request=request, use_tqdm=False)
        assert_at_rest(llm)


def test_metrics(llm: LLM, adapted: Adapted) -> None:
    made(llm, adapted, PROMPTS[:1], ["a"])
    values = {metric.name: metric for metric in llm.get_metrics()}
    assert values["quire:adapter_host_queries"].value >= 1
    assert values["quire:adapters_hosted"].value >= 1
    assert values["quire:lora_requests_info"].labels["max_lora"] == "3"
