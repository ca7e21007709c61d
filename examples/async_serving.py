"""AsyncLLM: clients of one event loop come and go, share the batch, and one is aborted."""

import asyncio

from quire import AsyncLLM, RequestOutputKind, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.DELTA)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)


async def client(llm: AsyncLLM, prompt: str) -> str:
    text = ""
    async for output in llm.generate(prompt, PARAMS):
        text += output.outputs[0].text
    return text


async def impatient_client(llm: AsyncLLM) -> str:
    async for output in llm.generate("1 2 3 4", ENDLESS, request_id="endless"):
        completion = output.outputs[0]
        if len(completion.token_ids) == 5:
            await llm.abort("endless")
    return f"{completion.finish_reason} after at least 5 tokens"


async def main() -> None:
    llm = AsyncLLM()
    try:
        prompts = ["The sun is", "The moon is", "The sea is"]
        *texts, ending = await asyncio.gather(
            *(client(llm, prompt) for prompt in prompts), impatient_client(llm)
        )
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt!r} -> {text!r}")
        print(f"the impatient client: {ending}")
    finally:
        llm.shutdown()


asyncio.run(main())
