"""The first thing to run: several prompts at once on the embedded model, one of them streamed.

python examples/demo.py
"""

import time

from quire import LLM, RequestOutputKind

QUESTIONS = [
    "What is a computer?",
    "Explain recursion in one sentence.",
    "Give me three tips for healthy eating.",
    "What is the internet?",
    "What is gravity?",
    "Write one line of Python that reverses a list.",
]
SYSTEM = "You are a helpful assistant. Always be concise, and answer in plain words."


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def main() -> None:
    with LLM() as llm:
        params = llm.get_default_sampling_params()
        params.max_tokens = 96

        print(f"\n[1 of {len(QUESTIONS)}, streamed] {QUESTIONS[0]}\n", flush=True)
        started = time.perf_counter()
        streaming = params.clone()
        streaming.output_kind = RequestOutputKind.DELTA
        for output in llm.stream_chat(conversation(QUESTIONS[0]), streaming):
            print(output.outputs[0].text, end="", flush=True)
        print("\n")

        outputs = llm.chat([conversation(question) for question in QUESTIONS[1:]], params)
        elapsed = time.perf_counter() - started
        for question, output in zip(QUESTIONS[1:], outputs, strict=True):
            print(f"\n> {question}\n{output.outputs[0].text.strip()}")

        stats = llm.statistics()
        print(
            f"\n{stats.generation_tokens} tokens in {elapsed:.1f} s: "
            f"{stats.generation_tokens / elapsed:.1f} tokens/s"
            f"\nKV blocks used at once: {stats.peak_blocks} of {stats.num_blocks} "
            f"({stats.block_size} tokens each)"
            f"\nKV memory wasted: {stats.waste:.1%} of the slots in use"
            f"\nprefix-cache hit rate: {stats.hit_rate:.1%} of prompt tokens"
        )


if __name__ == "__main__":
    main()
