"""GPU kernels in Triton; twins in `kernels/torch` specify them."""
