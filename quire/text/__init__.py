"""Text <-> tokens: tokenizers, chat templates, and what replies hold. Knows no engine."""
