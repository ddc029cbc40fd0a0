"""Execute a plan: write every output tensor, block by block, at its final offset in its file.

    done = execute(plan, sources, out)      # threads, the largest tensors first; execute.py
    done.tensors["lm_head.weight"]          # Written: its hash, and what was counted; outcome.py

writer.py      files of a checkpoint before they are written: shards, headers, index, disk space
compute.py     one tensor in blocks, with torch; lora_merge.py: plain LoRA in bf16 with a C kernel
worker.py      where the work runs: here, or in a child process that has imported torch
"""
