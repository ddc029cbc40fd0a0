"""Training inside the ranks that `torchrun` starts. The only importer of deepspeed.

job                      settings and paths of a run; knows no torch
entry, run               start and end of a rank; what it does in order (`train_with`)
loop, steps              the whole run; parts of an optimizer step that online RL shares
losses, passes           objectives as functions; their forward passes
resume, selection        the checkpoint to resume from; best evaluation and early stopping
outputs                  the files that rank 0 writes beside the partitions
tokens/, model/          dataset rows to packed rows; base model, adapter, forward pass
engine/                  DeepSpeed, checkpoints, partitions
memory                   estimated memory of a rank
"""
