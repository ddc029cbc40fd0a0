"""From the rows of a dataset artifact to packed micro-batches of token ids.

data            `load_split`: a tokenised split, made by all ranks, once per run
chat            token ids and loss marks of conversations and raw texts
truncation      rows longer than `train.max_len`
examples        tokenised examples on disk, memory-mapped
rows            the examples of each step, rank and row; rows without padding
"""
