"""DeepSpeed around the model: ranks, checkpoints, partitions, failures.

deepspeed_engine  the ranks and the engine
saving            checkpoints as ranks write and read them
partitions        which part of every trained tensor a rank writes
"""
