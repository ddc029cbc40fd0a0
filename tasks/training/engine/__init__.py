"""DeepSpeed around the model: ranks, checkpoints, partitions, failures.

deepspeed_engine, zero_config  the process group and `start_engine`; DeepSpeed's configuration
saving, checkpoint, universal  `save` and `restore`; checkpoint folders; another number of ranks
partitions                     each rank's part of the trained tensors: written, read
failure                        errors in plain words
offload                        optimizer states in host memory during rollouts
"""
