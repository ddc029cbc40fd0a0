"""deliver: gather, merge, convert and check a checkpoint (SOURCE) that was made elsewhere.

given, adapters = given_adapters(source, [])     source.py: an adapter, a model, shards, DeepSpeed
base = find_base(given, None, store)             base.py: its base; a wrong one is refused
reports = examine([given.root], base)            examination.py: audit SOURCE
choice = choose_base(given, base, merge, store)  the original or the dequantized base, by `evidence`
work = prepare(Request(given, base, ...))        plan.py: every operation, before a byte is written
gather, merge, convert                           stages.py: run the plans with the chain's code
reference                                        reference.py: what the served folder is compared to
require_intact(inputs, store); put(served, out)  folders.py: inputs as published; OUT in one step
"""
