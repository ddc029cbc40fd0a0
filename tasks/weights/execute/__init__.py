"""Running a plan: tensors from their sources to their final offsets, block by block.

execute       a plan to finished files, resumable
compute       one tensor that is computed; `copying` is for those that are not
recheck in `proof/` reads sampled rows again
"""
