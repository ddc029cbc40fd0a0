"""Execute a plan: write every output tensor, block by block, at its final offset in its file.

execute    run a plan to finished files; `outcome` is what it returns
compute    compute one tensor; `copying` handles tensors that need no arithmetic
worker     the same work in a child process that has imported torch and transformers
"""
