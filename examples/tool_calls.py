"""A conversation with a tool: the model must call it, the program answers, the model goes on.

Starts a server of its own; with one that runs already, give its address to the client instead.
"""

import json
import re
import subprocess
import sys

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city now",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
            },
        },
    }
]


def get_weather(city: str, unit: str) -> str:
    return f"18 degrees {unit} and sunny in {city}"


def converse(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", temperature=0,
        parallel_tool_calls=False,
    )  # fmt: skip
    message = reply.choices[0].message
    call = message.tool_calls[0]
    print(f"{reply.choices[0].finish_reason}: {call.function.name}({call.function.arguments})")
    result = get_weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=40
    )
    print(f"answer: {answer.choices[0].message.content}")


def main() -> None:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--max-model-len", "1024"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        found = next(filter(None, (re.search(r"serving on (\S+)", s) for s in server.stderr)))
        converse(openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none"))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
