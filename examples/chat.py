"""Conversations: a system message, a second question, and several conversations at once."""

from quire import LLM, SamplingParams

SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."}

llm = LLM()
params = SamplingParams(temperature=0.0, max_tokens=32)

messages = [SYSTEM, {"role": "user", "content": "What is the capital of Japan?"}]
answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
print(f"first answer: {answer}")

messages += [
    {"role": "assistant", "content": answer},
    {"role": "user", "content": "And of Germany?"},
]
second = llm.chat(messages, params, use_tqdm=False)[0]
print(f"second answer: {second.outputs[0].text}")
print(f"tokens not computed again: {second.num_cached_tokens} of {len(second.prompt_token_ids)}")

questions = ["What is a noun?", "What is a verb?"]
several = [[SYSTEM, {"role": "user", "content": question}] for question in questions]
for question, output in zip(questions, llm.chat(several, params, use_tqdm=False), strict=True):
    print(f"{question} {output.outputs[0].text}")
