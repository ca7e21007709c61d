"""Module paths that users of vLLM know."""
