"""A conversation with a tool: the model must call it, the program answers, the model goes on.

Starts a server of its own; with one that runs already, give its address to the client instead.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time

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
    return f"The weather in {city} is sunny, 18 degrees {unit}."


def converse(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", temperature=0,
        parallel_tool_calls=False, max_tokens=100,
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


def wait_for(client: openai.OpenAI, server: subprocess.Popen, seconds: int = 120) -> None:
    """Returns when the server answers."""
    for _ in range(seconds * 5):
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}")
        with contextlib.suppress(openai.APIConnectionError, openai.APIStatusError):
            client.with_options(max_retries=0, timeout=10).models.list()
            return
        time.sleep(0.2)
    sys.exit(f"the server did not answer within {seconds} s")


def main() -> None:
    with socket.socket() as probe:  # a port that is free
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "quire", "serve", "--port", port, "--max-model-len", "1024"]
    server = subprocess.Popen(command)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    try:
        wait_for(client, server)
        converse(client)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
