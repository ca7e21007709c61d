"""How likely tokens were: the generated ones with their rivals, and those of the prompt."""

import math

from quire import LLM, SamplingParams

llm = LLM()
params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=0)
(output,) = llm.generate("The capital of France is", params, use_tqdm=False)

print("prompt:")
for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
    found = entry[token]
    print(f"  {found.decoded_token!r:12} {math.exp(found.logprob):7.2%}  rank {found.rank}")

print("generated, each with the two most likely tokens:")
completion = output.outputs[0]
for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
    rivals = ", ".join(f"{e.decoded_token!r} {math.exp(e.logprob):.2%}" for e in entry.values())
    print(f"  {entry[token].decoded_token!r:12} {rivals}")
print(f"cumulative logprob: {completion.cumulative_logprob:.3f}")
