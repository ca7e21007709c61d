"""Anthropic's protocol: messages and their token counts."""
