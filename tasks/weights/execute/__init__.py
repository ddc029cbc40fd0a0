"""Execute a plan: write every output tensor, block by block, at its final offset in its file.

done = execute(plan, sources, out)       threads that write finished files; `worker.write` does so
done.checksums, done.kept                in a child process that has imported torch

compute      one tensor in blocks, with torch; `lora_merge` does plain LoRA in bf16 with a C kernel
copying      tensors and files that need no arithmetic
outcome      what is known about written tensors, and the checks made of it
writer       files of a checkpoint before they are written: shards, headers, index, disk space
"""
