"""Text as it is made: one prompt, printed piece by piece, and what comes with the last piece."""

from quire import LLM, RequestOutputKind, SamplingParams

llm = LLM()
# DELTA: each output holds only what is new. CUMULATIVE, the default: everything so far.
params = SamplingParams(temperature=0.0, max_tokens=32, output_kind=RequestOutputKind.DELTA)

pieces = 0
for output in llm.stream("The sea is", params):
    print(output.outputs[0].text, end="", flush=True)
    pieces += 1
print(f"\n{pieces} pieces; finish_reason: {output.outputs[0].finish_reason}")

# Leaving the loop gives the request up and frees its memory at once.
for output in llm.stream("Once upon a time", params):
    print(f"first piece: {output.outputs[0].text!r}")
    break
