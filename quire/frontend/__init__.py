"""Text <-> tokens and the Python API: what a user holds in hand."""
