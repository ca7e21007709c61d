"""OpenAI's protocol: completions, chat completions, responses and embeddings."""
