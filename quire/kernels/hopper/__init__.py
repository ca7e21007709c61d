"""Kernels that only NVIDIA Hopper GPUs can run, in Triton's lower level, Gluon."""
