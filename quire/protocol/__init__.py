"""What crosses a process boundary: requests, plans, results, outputs, errors. No torch."""
