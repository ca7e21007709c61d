"""Tensors of foreign files, one at a time."""
