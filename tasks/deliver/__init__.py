"""deliver: the back half of the chain, on a checkpoint that was made elsewhere.

recognise   what SOURCE is: an adapter, a full model, our shards, a DeepSpeed checkpoint
base        which base it belongs to, and whether the one given is that one
planning    every operation, from headers alone; every finding in one error
stages      gather, merge, convert: the plans carried out, with the verdicts
smoke       the served folder in the engine that will serve it, beside the reference
outlet      OUT: the served artifact, visible all at once
"""
