"""What crosses a process boundary: requests, plans, results, outputs, errors. No torch."""

__version__ = "0.1.0"
