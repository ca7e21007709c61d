"""The OpenAI protocol: completions and chat completions."""
