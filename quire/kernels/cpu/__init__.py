"""Kernels for CPUs: a small C++ library that the package builds (see src/), called with ctypes.

The library is optional: `available` says whether it is there, and if not, why.
"""

from quire.kernels.cpu.library import available, isas, set_isa, set_num_threads

__all__ = ["available", "isas", "set_isa", "set_num_threads"]
