"""Plan and check the hand-off of a model: a checkpoint (SOURCE), or what was trained here.

source = open_folder(folder)                source.py: an adapter, a model, shards, ...
base = find_base(source, None, store)       base.py: its base; a wrong one is refused
report = examine(source)                    source.py: audit SOURCE
choice = choose_base(source, base, ...)     base.py: original or dequantized, by `evidence`
tokens = find_tokens([source.root])         tokens.py: the tokenizer and what agrees with it
work = prepare(Request(source=source, ...)) plan.py: all operations, before any is run
reference(out, model=base, ...)             reference.py: what a delivery is compared with
require_intact(inputs, store); put(served, out)     folders.py: inputs as published; OUT in one step
"""
