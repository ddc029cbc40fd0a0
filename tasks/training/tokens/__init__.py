"""From the rows of a dataset artifact to packed micro-batches of token ids.

data                   `load_split`: a tokenised split, from the cache or made by all ranks
rows, example_spec     rows by number; the conversations and numbers of each example
chat, documents        token ids and loss marks of conversations and of raw texts
truncation             rows longer than `train.max_len`
examples, token_cache  tokenised examples on disk, memory-mapped and shared by runs
order, packing         the examples of each step, rank and row; rows without padding
"""
