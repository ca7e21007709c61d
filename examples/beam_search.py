"""Beam search: the most likely continuations as wholes, which share their common blocks."""

from quire import LLM
from quire.sampling_params import BeamSearchParams

llm = LLM()
prompts = ["The capital of France is", "The opposite of hot is"]
outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=10))
for prompt, output in zip(prompts, outputs, strict=True):
    print(prompt)
    for sequence in output.sequences:  # best first; text and tokens include the prompt
        text = sequence.text.removeprefix(prompt)
        print(f"  {sequence.cum_logprob:8.3f}  {text!r}  ({sequence.finish_reason})")
