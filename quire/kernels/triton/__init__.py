"""GPU kernels in Triton; references in `kernels/torch` specify them."""
