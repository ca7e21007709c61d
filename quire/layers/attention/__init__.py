"""Attention: what a backend is (`backend`), what a layer gives it (`layer`), and the backends."""
