"""Reading what a model writes: tool calls and reasoning, found in text as it comes."""
