"""DeepSpeed around the model: ranks, checkpoints, partitions, failures.

deepspeed_engine, zero_config  process group, `start_engine`, `TrainerStates`; DeepSpeed's settings
saving, checkpoint             save and restore engines; checkpoint folders, where a run goes on
partitions                     each rank's part of the trained tensors; full tensors under ZeRO-3
failure                        errors in plain words
"""
