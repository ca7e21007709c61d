"""Several completions of one prompt, and seeds that repeat whatever else is in the batch."""

from quire import LLM, SamplingParams

llm = LLM()
prompt = "My favourite colour is"

# The prompt is computed once; the three completions share its memory.
(several,) = llm.generate(
    prompt, SamplingParams(n=3, temperature=0.7, seed=7, max_tokens=12), use_tqdm=False
)
for completion in several.outputs:
    print(f"completion {completion.index}: {completion.text!r}")

# One SamplingParams per prompt. A seeded request draws the same numbers alone and in company.
seeded = SamplingParams(temperature=0.7, seed=42, max_tokens=12)
free = SamplingParams(temperature=0.7, max_tokens=12)
(alone,) = llm.generate(prompt, seeded, use_tqdm=False)
crowd = llm.generate([prompt, prompt, "The sea is"], [seeded, free, free], use_tqdm=False)
print(f"alone:       {alone.outputs[0].text!r}")
print(f"in company:  {crowd[0].outputs[0].text!r}")
print(f"no seed:     {crowd[1].outputs[0].text!r}")
