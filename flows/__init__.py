"""Commands that a user runs, one file each: Hydra configuration in, one Prefect flow out.

rlhf    train a model and prove that the served model is the trained one
deliver the second half of that chain, for a checkpoint that was trained elsewhere
audit   find what is wrong with a checkpoint
verify  say whether a running server is the model that was trained
compare differences of two runs (no flow)
status  show what runs and what ran, from local files (no flow)
"""
