"""DeepSpeed's own checkpoints, read without DeepSpeed: what training that was not ours left.

layout        which folder, which step, whose files
states        one rank's file, in types
ranks         whether all ranks are there, of one step
pieces        flat partitions, as ranges of files
partitioned   ZeRO-1, 2 and 3: every parameter's place in the ranks' flat fp32 groups
agreement     whether the fp32 weights are those of the 16-bit module beside them
universal     `ds_to_universal`'s folder: one file a parameter
checkpoint    the whole as a `Source`

Nothing is unpickled and no tensor is read: all is planned from the files' tables.
"""
