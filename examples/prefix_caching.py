"""Prefix caching: what requests have in common is computed once, down to parts of blocks."""

from quire import LLM, SamplingParams

SYSTEM = "You are a helpful assistant. Always be concise. "
QUESTIONS = ["What is Python?", "Explain recursion", "What are closures?"]

llm = LLM(block_size=16)
params = SamplingParams(temperature=0.0, max_tokens=8)


def show(question: str, prompt: str | dict[str, str]) -> None:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    total = len(output.prompt_token_ids)
    print(f"{question:20} {output.num_cached_tokens:2} of {total} prompt tokens from the cache")


for question in QUESTIONS:
    show(question, SYSTEM + question)

print("another salt, so nothing is shared:")
show(QUESTIONS[0], {"prompt": SYSTEM + QUESTIONS[0], "cache_salt": "another tenant"})

print("after reset_prefix_cache():")
llm.reset_prefix_cache()
show(QUESTIONS[0], SYSTEM + QUESTIONS[0])

print(f"hit rate so far: {llm.statistics().hit_rate:.1%}")
