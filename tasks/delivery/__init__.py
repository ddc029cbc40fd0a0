"""Plan and check the hand-off of a model: a checkpoint (SOURCE), or what was trained here.

checkpoint, adapters = read_sources(source, [])     source.py: an adapter, a model, shards, ...
base = find_base(checkpoint, None, store)           base.py: its base; a wrong one is refused
reports = examine([checkpoint.root], base)          examination.py: audit SOURCE
choice = choose_base(checkpoint, base, ...)         base.py: original or dequantized, by `evidence`
work = prepare(Request(checkpoint=...))             plan.py: all operations, before any is run
tokens = find_tokens([checkpoint.root])             tokens.py: the tokenizer and what agrees with it
reference(out, model=base, ...)                     reference.py: what a delivery is compared with
require_intact(inputs, store); put(served, out)     folders.py: inputs as published; OUT in one step
"""
