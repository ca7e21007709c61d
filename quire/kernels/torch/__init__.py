"""The plain-torch twins: what the native kernels must compute, and the fallback for them."""
