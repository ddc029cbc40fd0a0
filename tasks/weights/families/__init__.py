"""Families: which tensors of a checkpoint on disk make which tensors of the model in memory.

    found = trace(model, disk)             families/conversion.py, by transformers own conversion
    plan_merge(base, facts, changes, ...)  families/merging.py: adapter terms -> operations
    plan_full(trained, facts, ...)         families/gathering.py: trained live tensors -> operations

transformers 5 renames and fuses while it loads: the checkpoint's 2 x 128 expert matrices of a layer
are one tensor in memory, `model.` comes and goes, a vision model's language half moves. PEFT speaks
of what is in memory; servers read what is on disk. Nothing here lists names of architectures:
transformers' own conversion is run on `Traced` tensors (`traced.py`), which have shapes and
origins and no data.
"""
