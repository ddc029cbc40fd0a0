"""Training inside the ranks that `torchrun` starts. The only importer of deepspeed.

job                      settings and paths of a run; knows no torch
entry, run               start and end of a rank; what it does in order (`train_with`)
loop, steps, accumulate  the whole run; one optimizer step; its forward and backward passes
resume, selection        the checkpoint to resume from; best evaluation and early stopping
outputs                  the files that rank 0 writes beside the partitions
tokens/, model/          dataset rows to packed rows; base model, adapter, forward pass
engine/, objectives/     DeepSpeed, checkpoints, partitions; one file per loss
memory/                  estimated memory of a rank
"""
