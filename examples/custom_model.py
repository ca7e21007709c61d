"""A model of your own: a folder, a .gguf file or a hub name, given as the first argument."""

import sys

from quire import LLM, QuireError, SamplingParams

name = sys.argv[1] if len(sys.argv) > 1 else None  # None is the embedded model
try:
    # "auto": the longest context that fits into this much cache, at most the model's own.
    llm = LLM(model=name, max_model_len="auto", kv_cache_memory_bytes="128MiB")
except QuireError as error:
    sys.exit(f"{name} cannot be used: {error}")

config = llm.model_config
print(f"{config.source.name}: {config.architecture} from {config.source.kind} {config.source.path}")
print(f"{config.num_layers} layers, width {config.hidden_size}, vocabulary {config.vocab_size:,}")
print(f"up to {llm.options.model.max_model_len:,} tokens of prompt and output")

# Without parameters the model's own generation_config.json decides.
params = llm.get_default_sampling_params()
params.max_tokens = 16
(output,) = llm.generate("The quick brown fox", params, use_tqdm=False)
print(f"default temperature {params.temperature:g}: {output.outputs[0].text!r}")

greedy = SamplingParams(temperature=0.0, max_tokens=16)
(output,) = llm.generate("The quick brown fox", greedy, use_tqdm=False)
print(f"greedy: {output.outputs[0].text!r}")
