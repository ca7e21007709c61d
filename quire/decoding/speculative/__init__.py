"""Speculation: what proposes the drafts that a step verifies."""
