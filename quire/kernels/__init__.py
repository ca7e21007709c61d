"""Pure tensor functions. Each native kernel has a plain-torch twin, which is its specification."""
