"""A C kernel, compiled on first use for the CPU at hand. Without a compiler torch does its work.

binding     `library()`: the kernel, called on numpy arrays; None if it cannot be compiled

`fold.c` adds a LoRA product to bf16 rows; where BLAS sums in order, torch gives the same bytes.
"""

from tasks.weights.native.binding import Library, library

__all__ = ["Library", "library"]
