"""The Python API: what a user holds in hand."""
