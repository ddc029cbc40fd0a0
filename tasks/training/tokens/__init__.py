"""From rows of a dataset artifact to packed micro-batches.

examples      tokenised rows on disk, memory-mapped
truncation    which tokens of a row that is too long are kept
packing       rows laid end to end, without padding
"""
