"""C kernels, compiled on first use for the CPU at hand. Without a compiler work is slower.

binding     `library()`: the kernels, called on numpy arrays; None if they cannot be compiled
hashing     sha256 of several tensors side by side (`sha256_lanes.c`), else one by one with OpenSSL

`fold.c` adds a LoRA product to bf16 rows; where BLAS sums in order, torch gives the same bytes.
"""

from tasks.weights.native.binding import Library, library

__all__ = ["Library", "library"]
