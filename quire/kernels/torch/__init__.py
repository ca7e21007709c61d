"""The plain-torch references: what the native kernels must compute, and the fallback for them."""
