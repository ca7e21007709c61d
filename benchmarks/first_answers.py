"""What a newcomer gets from the embedded model: 100 everyday chats at several sampling settings.

    python benchmarks/first_answers.py
    python benchmarks/first_answers.py --precisions gguf gguf-a16 --settings greedy default --show

For each setting: how many answers end within 300 tokens, how many repeat themselves (some 8 tokens
occur 4 times or more), and how many of the 25 questions with a known answer get it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness import markdown_table, say
from quire import LLM, CompletionOutput, SamplingParams

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "gguf": {"quantization": "gguf"},
    "gguf-a16": {"quantization": "gguf-a16"},
}
SETTINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "greedy": {"temperature": 0.0},
    "greedy, penalty 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "0.2": {"temperature": 0.2, "top_p": 0.9},
    "0.2, penalty 1.05": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05},
    "0.2, penalty 1.1": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1},
    "0.2, penalty 1.2": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.2},
    "0.5, penalty 1.1": {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1},
    "1": {"temperature": 1.0},
}
"""Sampling parameters; None stands for what requests without any get."""

REPEATED_TOKENS, REPEATED_TIMES = 8, 4

# A question, and words of which a right answer has one; none where answers are free.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "What is the capital of France?": ("paris",),
    "What is the capital of Italy?": ("rome",),
    "What is the capital of Japan?": ("tokyo",),
    "What is the capital of Germany?": ("berlin",),
    "What is the capital of England?": ("london",),
    "What is the largest planet in the solar system?": ("jupiter",),
    "What is the largest ocean?": ("pacific",),
    "Who wrote Romeo and Juliet?": ("shakespeare",),
    "Who painted the Mona Lisa?": ("leonardo", "da vinci"),
    "What is the chemical symbol of water?": ("h2o", "h₂o"),
    "How many days are in a week?": ("7", "seven"),
    "How many legs does a spider have?": ("8", "eight"),
    "What is 2 + 2?": ("4", "four"),
    "What is 5 times 3?": ("15", "fifteen"),
    "What color is the sky?": ("blue",),
    "What is the opposite of hot?": ("cold", "cool"),
    "Which animal barks?": ("dog",),
    "What do bees make?": ("honey",),
    "What is the boiling point of water in Celsius?": ("100",),
    "On which continent is Egypt?": ("africa",),
    "Hello!": (),
    "Hi, how are you?": (),
    "Who are you?": (),
    "What can you do?": (),
    "Tell me a joke.": (),
    "Thank you!": (),
    "Good morning!": (),
    "Can you help me?": (),
    "What is your name?": (),
    "How does photosynthesis work?": (),
    "Why is the sky blue?": (),
    "What is gravity?": (),
    "Explain how a rainbow forms.": (),
    "What is a black hole?": (),
    "What is DNA?": (),
    "How do airplanes fly?": (),
    "Why do we have seasons?": (),
    "What is the water cycle?": (),
    "What causes earthquakes?": (),
    "How does the heart work?": (),
    "What is artificial intelligence?": (),
    "What is machine learning?": (),
    "What is Python?": (),
    "What is a computer?": (),
    "What is the internet?": (),
    "Explain recursion.": (),
    "What is a database?": (),
    "What is open source software?": (),
    "Write a Python function that adds two numbers.": (),
    "Write a Python program that prints Hello, world.": (),
    "How do I reverse a string in Python?": (),
    "What is a list in Python?": (),
    "What is HTML?": (),
    "Give me three tips for healthy eating.": (),
    "How can I sleep better?": (),
    "How can I learn a new language?": (),
    "Give me tips for a job interview.": (),
    "How do I stay motivated?": (),
    "How can I save money?": (),
    "How do I make new friends?": (),
    "How do I write a good email?": (),
    "How can I improve my writing?": (),
    "Give me a recipe for pancakes.": (),
    "How do I cook rice?": (),
    "What can I cook with eggs and tomatoes?": (),
    "How do I make tea?": (),
    "What is a good breakfast?": (),
    "Suggest a healthy snack.": (),
    "Write a short poem about the sea.": (),
    "Write a haiku about autumn.": (),
    "Write a short story about a dragon.": (),
    "Write a birthday message for my sister.": (),
    "Write a short email to thank my teacher.": (),
    "Write a slogan for a coffee shop.": (),
    "Write a sentence with the word happy.": (),
    "Tell me a story about a brave cat.": (),
    "Name three fruits.": (),
    "Name three colors.": (),
    "Name three countries in Europe.": (),
    "Name three musical instruments.": (),
    "List the planets of the solar system.": ("earth",),
    "List the days of the week.": ("monday", "sunday"),
    "List five animals.": (),
    "List the months of the year.": (),
    "What are the primary colors?": ("red",),
    "What are the four seasons?": ("winter",),
    'Translate "good morning" into French.': (),
    'Translate "thank you" into Spanish.': (),
    'What does the word "brave" mean?': (),
    "Give me a synonym for happy.": (),
    "Correct this sentence: She go to school yesterday.": (),
    "Summarize in one sentence: The cat sat on the mat because it was warm and sunny there.": (),
    "Is fire hot or cold?": ("hot",),
    "What should I do on a rainy day?": (),
    "What is the best way to travel?": (),
    "What is love?": (),
    "What is the meaning of life?": (),
    "What is a good book to read?": (),
    "Plan a weekend in the mountains.": (),
    "What is a healthy lifestyle?": (),
}


def repeats_itself(token_ids: Sequence[int]) -> bool:
    spans = zip(*(token_ids[start:] for start in range(REPEATED_TOKENS)), strict=False)
    return max(Counter(spans).values(), default=0) >= REPEATED_TIMES


def is_right(question: str, text: str) -> bool:
    return any(word in text.lower() for word in QUESTIONS[question])


def ask(llm: LLM, setting: dict[str, Any] | None, max_tokens: int) -> list[CompletionOutput]:
    """Answers to all questions, which run as one batch."""
    params = llm.get_default_sampling_params() if setting is None else SamplingParams(**setting)
    params.max_tokens = max_tokens
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="(default: the embedded model)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["gguf"])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--show", action="store_true", help="print the answers too")
    arguments = parser.parse_args(words)
    rows = []
    for precision in arguments.precisions:
        with LLM(arguments.model, max_model_len=1024, **PRECISIONS[precision]) as llm:
            for name in arguments.settings:
                answers = ask(llm, SETTINGS[name], arguments.max_tokens)
                ended = sum(answer.finish_reason == "stop" for answer in answers)
                repeated = sum(repeats_itself(answer.token_ids) for answer in answers)
                pairs = list(zip(QUESTIONS, answers, strict=True))
                right = sum(is_right(question, answer.text) for question, answer in pairs)
                rows.append([precision, name, str(ended), str(repeated), str(right)])
                say(f"{precision}, {name}: {ended} end, {repeated} repeat, {right} right")
                if arguments.show:
                    for question, answer in pairs:
                        say(f"[{precision}, {name}] {question}\n    {answer.text[:300]!r}")
    facts = sum(bool(words) for words in QUESTIONS.values())
    heads = ["precision", "sampling", "end", "repeat", f"right of {facts}"]
    say(f"{len(QUESTIONS)} chats, at most {arguments.max_tokens} tokens each\n")
    say(markdown_table(heads, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
