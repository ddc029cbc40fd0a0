"""deliver: the back half of the chain, on a checkpoint that was made elsewhere.

examination the audit of SOURCE, which comes first; `handled`: its errors that stop nothing, and why
recognise   what SOURCE is: an adapter, a full model, our shards, a DeepSpeed checkpoint
evidence    how a trainer held the base, by its own files; `quantization` decides by it
comparing   how far apart the merges into the two bases are (`merge.base=compare`)
identity    which base it belongs to, and whether the one given is that one
planning    every operation, from headers alone; every finding in one error
stages      gather, merge, convert: the plans carried out, with the verdicts
intact      our artifacts among what is given are what was published
smoke       the served folder in the engine that will serve it, beside the reference
rewards     the same of a reward model: rewards instead of next tokens
outlet      OUT: the served artifact, visible all at once
"""
