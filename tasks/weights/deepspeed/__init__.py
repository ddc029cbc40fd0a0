"""Read DeepSpeed's own checkpoints (ZeRO stages 0 to 3, universal) without DeepSpeed.

checkpoint    `read_zero(folder)`: a whole checkpoint as a `Source`
layout        find the step's folder and every rank's files
states        parse one rank's file, and check that the files of all ranks fit together
partitioned   locate every parameter in the ranks' flat fp32 groups

Nothing is unpickled and no tensor is loaded: the plan is made from the files' tables.
"""
