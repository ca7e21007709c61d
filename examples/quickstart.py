"""Two prompts, one call: the shortest useful script."""

from quire import LLM, SamplingParams

llm = LLM()  # the embedded model; LLM(model="facebook/opt-125m") takes one from the hub
outputs = llm.generate(
    ["The future of AI is", "The capital of France is"],
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=32),
)
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
