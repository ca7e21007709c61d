"""What NVIDIA GPUs can do from Hopper on: kernels in Triton's lower level, Gluon, and launches
that overlap."""
