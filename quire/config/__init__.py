"""Frozen options, their resolution and command line, and what a model's files say. No torch."""
