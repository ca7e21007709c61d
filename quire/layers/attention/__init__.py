"""Attention: what a backend is (`backend`), what it is given (`heads`), and the backends."""
