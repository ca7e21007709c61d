"""EAGLE-3 and MTP heads: they draft what straightforward code drafts, and no text changes.

The layers of MTP heads are transformers' own; those of EAGLE-3 are written out in
`tests.draft_heads`. Both compute whole sequences at once, the engine in pieces, with its cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from quire.lora.request import LoRARequest
from quire.protocol.errors import ModelError, OptionError
from tests.draft_heads import (
    Layer,
    drafts,
    forget,
    mtp_layer,
    random_eagle3,
    save_agreeing_eagle3,
    save_agreeing_mtp,
    save_eagle3,
    save_mtp,
    save_speculators,
    target_states,
)
from tests.engine.test_drafts import FEATURES, MAX_LEN, Recorder, generate, prompts_of, seen
from tests.frontend.test_adapters import save_adapter
from tests.models.reference import VOCAB, random_tokens
from tests.text.tokenizer_samples import write_json
from tests.tiny import assert_at_rest, save_tiny, tiny_llm

pytestmark = pytest.mark.usefixtures("native")
TIE = 1e-3


def assert_drafted(
    recorder: Recorder, layer: Layer, states: Callable[[list[int]], Tensor], least: int
) -> None:
    """All that was proposed is most likely by the reference, ties aside."""
    compared = 0
    for known, found in recorder.proposed:
        expected, distance = drafts(layer, states(known[:-1]), torch.tensor(known[1:]), len(found))
        if distance > TIE:
            assert found == expected, f"behind {len(known)} tokens"
            compared += 1
    assert compared >= least


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm-first": {"norm_before_residual": True},
    "own-embedding": {"own_embedding": True},
    "whole-vocabulary": {"draft_vocab": VOCAB},
    "outputs": {"layer_ids": (1, 5, 2), "norm_before_residual": True},
    "inputs": {"layer_ids": (0, 4, 1)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return save_tiny(folder, num_hidden_layers=6)


GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def run_greedy(llm: LLM) -> None:
    """Twice, so that the second time finds prompts in the cache, the part of a block included."""
    prompts = [random_tokens(9 + 6 * i, seed=200 + i) for i in range(4)]
    for _ in range(2):
        outputs = generate(llm, prompts, GREEDY)
    assert all(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("kind", HEADS)
def test_eagle3_drafts_what_the_reference_drafts(
    folder: Path, target: Any, tmp_path: Path, kind: str
) -> None:
    """In both layouts, by turns."""
    head = random_eagle3(target, **HEADS[kind])
    config: dict[str, Any] = {"model": str(tmp_path)}
    if list(HEADS).index(kind) % 2:
        save_speculators(tmp_path, head, target)
    else:
        save_eagle3(tmp_path, head, target, pickled=kind == "plain")
        config |= {"method": "eagle3", "num_speculative_tokens": 3}
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 15, "max_num_seqs": 3}
    with tiny_llm(
        folder, device="cpu", max_model_len=MAX_LEN, speculative_config=config, **options
    ) as llm:
        recorder = Recorder(llm)
        run_greedy(llm)
    num_layers = target.config.num_hidden_layers
    assert all(len(found) == 3 for _, found in recorder.proposed)

    def states(tokens: list[int]) -> Tensor:
        return head.combine(target_states(target, tokens), num_layers)

    assert_drafted(recorder, head.layer, states, least=40)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp_drafts_what_transformers_drafts(tmp_path: Path, family: str) -> None:
    model, mtp = save_mtp(tmp_path, family)
    config = {"method": "mtp", "num_speculative_tokens": 3}
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 15, "max_num_seqs": 3}
    with tiny_llm(
        tmp_path, device="cpu", max_model_len=MAX_LEN, speculative_config=config, **options
    ) as llm:
        recorder = Recorder(llm)
        run_greedy(llm)
    assert_drafted(
        recorder, mtp_layer(mtp), lambda tokens: target_states(model, tokens)[-1], least=40
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp_texts_are_those_of_assisted_generation(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers drafts with the same layer by `use_mtp`."""
    model, mtp = save_mtp(tmp_path, family)
    monkeypatch.setattr(type(mtp), "from_pretrained", lambda target, **how: mtp)
    prompts = [random_tokens(count, seed=count) for count in (4, 11)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        how: dict[str, Any] = {"use_mtp": True, "do_sample": False, "eos_token_id": VOCAB}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, **how)
        expected.append(made[0, len(prompt) :].tolist())
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    config = {"method": "mtp", "num_speculative_tokens": 2}
    options = {"max_model_len": MAX_LEN, "speculative_config": config}
    with tiny_llm(tmp_path, device="cpu", **options) as llm:
        outputs = generate(llm, prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm._core.metrics.draft_tokens.value > 0


KINDS = (
    "greedy",
    "drawn",
    "filters",
    "repetition",
    "bad_words",
    "allowed",
    "stop",
    "prompt_logprobs",
    "n",
    "one",
    "to_the_end",
)
ALL_FEATURES = [SamplingParams(**FEATURES[kind]) for kind in KINDS for _ in range(2)]
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3-chunks": (
        "eagle3",
        {"block_size": 4, "max_num_batched_tokens": 21, "max_num_seqs": 9},
    ),
    "eagle3-pool": ("eagle3", {"block_size": 4, "num_gpu_blocks_override": 44}),
    "eagle3-overlap": ("eagle3", {"block_size": 8, "max_steps_in_flight": 2}),
    "eagle3-uncached": ("eagle3", {"enable_prefix_caching": False, "max_steps_in_flight": 4}),
    "mtp": ("mtp", {"block_size": 8, "max_num_batched_tokens": 40}),
    "mtp-pool": ("mtp", {"block_size": 8, "num_gpu_blocks_override": 34}),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Targets whose next token depends on the last one alone, and heads that know the same: what
    they draft is mostly accepted. Of EAGLE-3's not all, as it has only a part of the vocabulary."""
    one, other, head = (tmp_path_factory.mktemp(name) for name in ("llama", "glm", "head"))
    save_agreeing_eagle3(head, save_tiny(one, num_hidden_layers=6))
    forget(one)
    save_agreeing_mtp(other, "glm4_moe")
    return {
        "eagle3": (one, {"model": str(head), "num_speculative_tokens": 3}),
        "mtp": (other, {"num_speculative_tokens": 3}),
    }


@pytest.fixture(scope="module")
def plain(pairs: dict[str, tuple[Path, dict[str, Any]]]) -> dict[str, list[Any]]:
    """Every feature without drafts, two requests each."""
    found = {}
    for kind, (folder, _) in pairs.items():
        with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN) as llm:
            found[kind] = seen(generate(llm, prompts_of(len(ALL_FEATURES)), ALL_FEATURES))
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_texts_stay_the_same(
    pairs: dict[str, tuple[Path, dict[str, Any]]], plain: dict[str, list[Any]], setting: str
) -> None:
    """Twice, so that the second time finds prompts in the cache; some requests are preempted."""
    kind, options = SETTINGS[setting]
    folder, config = pairs[kind]
    options = {"device": "cpu", "max_model_len": MAX_LEN, **options}
    with tiny_llm(folder, speculative_config=config, **options) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts_of(len(ALL_FEATURES)), ALL_FEATURES)
            assert seen(outputs) == plain[kind]
        metrics = llm._core.metrics
        share = metrics.accepted_tokens.value / metrics.draft_tokens.value
        assert share > (0.3 if kind == "eagle3" else 0.8)
        assert (llm.statistics().num_preemptions > 0) == ("pool" in setting)
        assert_at_rest(llm)


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_ranks_draft_together(
    pairs: dict[str, tuple[Path, dict[str, Any]]], plain: dict[str, list[Any]], kind: str
) -> None:
    """Sums have another order there; these texts have no ties."""
    folder, config = pairs[kind]
    options: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 1, "device": "cpu"}
    with tiny_llm(folder, max_model_len=MAX_LEN, speculative_config=config, **options) as llm:
        outputs = generate(llm, prompts_of(4), ALL_FEATURES[:4])
        tokens = [[c.token_ids for c in output.outputs] for output in outputs]
        assert tokens == [[c[0] for c in completions] for _, completions in plain[kind][:4]]
        assert llm._core.metrics.accepted_tokens.value > 20
        assert_at_rest(llm)


def test_requests_with_adapters_beside_others(tmp_path: Path) -> None:
    """The head shares its target's embedding and output head, and uses them as they are."""
    folder, adapter = tmp_path / "target", tmp_path / "adapter"
    folder.mkdir()
    model, _ = save_mtp(folder, "glm4_moe")
    modules = ["q_proj", "embed_tokens", "lm_head"]
    save_adapter(model, adapter, 0, r=8, target_modules=modules)
    request = LoRARequest("a", 1, str(adapter))
    found = []
    for config in ({}, {"method": "mtp", "num_speculative_tokens": 2}):
        options: dict[str, Any] = {"enable_lora": True, "speculative_config": config}
        with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, **options) as llm:
            prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(4)]
            adapters = [request, None, request, None]
            outputs = llm.generate(prompts, ALL_FEATURES[:4], use_tqdm=False, lora_request=adapters)
            found.append(seen(outputs))
            assert_at_rest(llm)
            assert not config or llm._core.metrics.draft_tokens.value > 50
    assert found[0] == found[1]


def test_a_head_drafts_up_to_the_length_that_is_asked_for(
    pairs: dict[str, tuple[Path, dict[str, Any]]],
) -> None:
    folder, config = pairs["eagle3"]
    config = {**config, "max_model_len": 25}
    with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, speculative_config=config) as llm:
        recorder = Recorder(llm)
        generate(llm, prompts_of(2), SamplingParams(temperature=0.0, max_tokens=30))
    ends = {len(known) + 3 <= 25: found for known, found in recorder.proposed}
    assert ends[False] == [-1, -1, -1] and min(ends[True]) >= 0


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_rounded_while_they_load_draft_too(tmp_path: Path, family: str) -> None:
    """More drafts than a block has places, and a cache of other numbers than activations."""
    save_agreeing_mtp(tmp_path, family)
    options: dict[str, Any] = {"quantization": "int8", "device": "cpu", "block_size": 4}
    found = []
    for config in ({}, {"method": "mtp", "num_speculative_tokens": 9}):
        with tiny_llm(tmp_path, max_model_len=MAX_LEN, speculative_config=config, **options) as llm:
            found.append(seen(generate(llm, prompts_of(6), ALL_FEATURES[:6])))
            metrics = llm._core.metrics
    assert found[0] == found[1]
    assert metrics.accepted_tokens.value > 0.8 * metrics.draft_tokens.value > 80


def test_beams_and_grammars_beside_drafts(
    pairs: dict[str, tuple[Path, dict[str, Any]]],
) -> None:
    """Tokens that the host chooses come a step later; what a grammar forbids is cut."""
    folder, config = pairs["eagle3"]
    grammar = StructuredOutputs(regex="[a-f]{8}[0-9]{8}")
    params = [
        SamplingParams(**FEATURES["drawn"], structured_outputs=grammar),
        SamplingParams(**FEATURES["greedy"]),
    ]
    found = []
    for speculative_config in ({}, config):
        options = {"max_model_len": MAX_LEN, "speculative_config": speculative_config}
        with tiny_llm(folder, device="cpu", **options) as llm:
            prompts = [{"prompt_token_ids": p} for p in prompts_of(2)]
            beams = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=12))
            outputs = generate(llm, prompts_of(2), params)
            found.append((seen(outputs), [[b.tokens for b in o.sequences] for o in beams]))
            assert_at_rest(llm)
    assert found[0] == found[1]


def edited(folder: Path, **changes: Any) -> None:
    """Changes values of config.json, and removes those that are None."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    write_json(file, {key: value for key, value in config.items() if value is not None})


def start(folder: Path, config: dict[str, Any]) -> None:
    with tiny_llm(folder, device="cpu", max_model_len=MAX_LEN, speculative_config=config):
        pass


WRONG_HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": VOCAB + 3}, f"vocabulary of {VOCAB + 3} tokens.* {VOCAB};"),
    "hidden-size": ({"target_hidden_size": 48}, "hidden states of 48 numbers.* have 64"),
    "layers": (
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
        "enters the layers 2, 4, 9, and .* has 6",
    ),
    "two-layers": ({"num_hidden_layers": 2}, "num_hidden_layers.*1 in an EAGLE-3 head.*2"),
    "norm": ({"norm_before_fc": True}, "norm_before_fc.*false"),
    "eagle-1": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state.*true"),
    "family": ({"model_type": "deepseek_v3"}, "model_type.*llama.*deepseek_v3"),
    "draft-vocabulary": ({"draft_vocab_size": 300}, "draft_vocab_size=300"),
}


@pytest.mark.parametrize("kind", WRONG_HEADS)
def test_a_head_for_another_model_is_refused(
    folder: Path, target: Any, tmp_path: Path, kind: str
) -> None:
    save_eagle3(tmp_path, random_eagle3(target), target)
    changes, message = WRONG_HEADS[kind]
    edited(tmp_path, **changes)
    with pytest.raises((OptionError, ModelError), match=message):
        start(folder, {"model": str(tmp_path), "num_speculative_tokens": 2})


def test_tensors_of_heads_are_looked_at_before_any_is_loaded(
    folder: Path, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_eagle3(target)
    wrong = {**head.tensors, "fc.weight": head.tensors["fc.weight"][:, :64]}
    del wrong["midlayer.hidden_norm.weight"]
    save_eagle3(tmp_path, replace(head, tensors=wrong), target)
    monkeypatch.setattr("quire.worker.worker.load_model", None)
    with pytest.raises(ModelError, match=r"missing: midlayer.hidden_norm.weight.*fc.weight"):
        start(folder, {"model": str(tmp_path), "num_speculative_tokens": 2})


def test_drafts_beyond_the_vocabulary_are_refused(
    folder: Path, target: Any, tmp_path: Path
) -> None:
    head = random_eagle3(target)
    head.tensors["d2t"][5] = VOCAB
    save_eagle3(tmp_path, head, target)
    with pytest.raises(ModelError, match=f"d2t.*{VOCAB}"):
        start(folder, {"model": str(tmp_path), "num_speculative_tokens": 2})


def test_methods_that_do_not_fit_a_model_are_refused(
    folder: Path, target: Any, tmp_path: Path
) -> None:
    head = str(save_eagle3(tmp_path / "head", random_eagle3(target), target))
    other = tmp_path / "opt"
    save_tiny(other, "opt")
    count = {"num_speculative_tokens": 2}
    for config, message in (
        ({"method": "eagle3", "model": str(folder)}, "LlamaForCausalLM, not an EAGLE-3 head"),
        ({"method": "draft_model", "model": head}, "EAGLE-3 head; use method 'eagle3'"),
        ({"method": "auto", "model": head}, "EAGLE-3 head; use method 'eagle3'"),
        ({"method": "mtp"}, "num_nextn_predict_layers"),
        ({}, "num_nextn_predict_layers"),
    ):
        with pytest.raises(OptionError, match=message):
            start(folder, {**config, **count})
    with pytest.raises(OptionError, match=r"'num_speculative_tokens'.*does not say"):
        start(folder, {"model": head})
    with pytest.raises(OptionError, match=r"'draft_tensor_parallel_size'.*\(1\).*got 2"):
        start(folder, {"model": head, **count, "draft_tensor_parallel_size": 2})
    with pytest.raises(OptionError, match=r"residual streams.*OPTForCausalLM"):
        start(other, {"model": head, **count})
    with pytest.raises(OptionError, match="is an EAGLE-3 head, which drafts for another model"):
        start(Path(head), {})


def test_mtp_layers_must_be_there(tmp_path: Path) -> None:
    save_tiny(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    with pytest.raises(ModelError, match=r"missing: model\.layers\.3\..*"):
        start(tmp_path, {"method": "mtp"})
    edited(tmp_path, num_nextn_predict_layers=2)
    with pytest.raises(OptionError, match="num_nextn_predict_layers=2"):
        start(tmp_path, {"method": "mtp"})
    with pytest.raises(OptionError, match="'other' is not the target"):
        edited(tmp_path, num_nextn_predict_layers=1)
        start(tmp_path, {"method": "mtp", "model": "other"})
