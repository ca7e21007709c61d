"""Names of models as other programs write them, and what to write instead."""

from __future__ import annotations

import re

# Families in Ollama's library -> the repository on the hub, with the size as the hub writes it.
_FAMILIES = {
    "llama2": ("meta-llama/Llama-2-{size}-chat-hf", "7b"),
    "llama3": ("meta-llama/Meta-Llama-3-{size}-Instruct", "8B"),
    "llama3.1": ("meta-llama/Llama-3.1-{size}-Instruct", "8B"),
    "llama3.2": ("meta-llama/Llama-3.2-{size}-Instruct", "3B"),
    "mistral": ("mistralai/Mistral-{size}-Instruct-v0.3", "7B"),
    "qwen2": ("Qwen/Qwen2-{size}-Instruct", "7B"),
    "qwen2.5": ("Qwen/Qwen2.5-{size}-Instruct", "7B"),
    "qwen3": ("Qwen/Qwen3-{size}", "8B"),
    "smollm2": ("HuggingFaceTB/SmolLM2-{size}-Instruct", "1.7B"),
    "tinyllama": ("TinyLlama/TinyLlama-{size}-Chat-v1.0", "1.1B"),
}
_HUB = re.compile(r"((https?://)?(www\.)?(huggingface\.co|hf\.co)/|hf://|hf:)(?P<rest>.+)")
_TAGGED = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)*)[:@](?P<tag>[\w.-]+)")
_ANY = "Give a folder, a .gguf file, or a name on the Hugging Face hub such as Qwen/Qwen3-0.6B"


def remedy_for(name: str) -> str | None:
    """What is wrong with the spelling of `name`, which no local file has, and what to write; None
    if it may be a path or a name on the hub."""
    if found := _HUB.fullmatch(name):
        return _hub_address(found["rest"])
    if "://" in name:
        return f"Quire does not read addresses. {_ANY}"
    if found := _TAGGED.fullmatch(name):
        if "/" in found["name"]:
            return _revision(found["name"], found["tag"])
        return _ollama(found["name"], found["tag"])
    return _ollama(name, "") if name in _FAMILIES else None


def _hub_address(rest: str) -> str:
    words = rest.partition("?")[0].strip("/").split("/")
    repository, more = "/".join(words[:2]), words[2:]
    if found := _TAGGED.fullmatch(repository):
        return _revision(found["name"], found["tag"])
    if more and more[-1].endswith(".gguf"):
        file = "/".join(more[2:] if more[0] in ("resolve", "blob") else more)
        return (
            f"Quire does not read addresses. Run `hf download {repository} {file}` and give the "
            "path that it prints"
        )
    text = f"Of an address on the hub only the name is needed: write {repository!r}"
    if len(more) > 1 and more[0] == "tree" and more[1] != "main":
        return f"{text} with revision={more[1]!r} (--revision {more[1]})"
    return text


def _revision(name: str, tag: str) -> str:
    if re.match(r"(?i)(iq|q|bf|f)\d", tag):
        return (
            f"Names on the hub have no tags. For one GGUF file of several, run "
            f"`hf download {name} --include '*{tag}*'` and give the path of the file"
        )
    return (
        f"Names on the hub have no tags: write {name!r}, with revision={tag!r} (--revision {tag}) "
        "if that is a branch, a tag or a commit there"
    )


def _ollama(name: str, tag: str) -> str:
    family = _FAMILIES.get(name.lower())
    if family is None:
        return f"This looks like a name in Ollama's library, which Quire does not read. {_ANY}"
    text = "This is a name in Ollama's library, which Quire does not read."
    pattern, size = family
    given = re.match(r"\d+(\.\d+)?[bm]", tag.lower())
    if given:
        size = given[0].upper() if size[-1].isupper() else given[0]
    return f"{text} On the Hugging Face hub the model is {pattern.format(size=size)!r}: write that"
