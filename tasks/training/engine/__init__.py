"""DeepSpeed around the model: ranks, checkpoints, partitions, failures.

deepspeed_engine, zero_config  process group, `start_engine`, `TrainerStates`; DeepSpeed's settings
saving, checkpoint             save and restore engines; checkpoint folders, where a run goes on
failure                        errors in plain words
"""
