"""A few kernels in C, compiled on first use for the CPU at hand.

What they do is possible without them, only slower: hashing several tensors side by side
(`sha256_lanes.c`, else OpenSSL's one at a time) and adding a LoRA product to bf16 rows (`fold.c`,
else torch). Results are the same bytes, which tests hold them to. No compiler, no kernels.
"""

from tasks.weights.native.binding import Library, library

__all__ = ["Library", "library"]
