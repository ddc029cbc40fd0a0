"""Tensors on disk. Knows no trainer, no Prefect, no MLflow; torch only where numbers are computed.

header, reader, writer    one file; a folder of them; names, headers and offsets of those to come
index, documents          which files make a checkpoint, by its index; JSON files of bounded size
source, extents, opening  whoever wrote the files: what is there, in which ranges; reading those
plan, terms               one operation a tensor, as plain data; what adapters do to one
validate, coverage        everything that headers tell, in one error; is all of the input used
layout                    where each tensor goes, and which files are links
execute, running          a plan run by several workers, with a journal to go on from
copying, sinks, casts     what one tensor costs: a link, a kernel copy, a cast; where it goes
compute, wholes, blocks   blocks of rows with torch; what has to be in memory whole
names, partitions         what a tensor is called; every rank's slices into whole tensors
contracts, adapter_contract  what must be there, asked of the model's class on the meta device
adapters/, families/      what a PEFT folder does, by live names; those names and the keys on disk
heads/, vocabulary        value and reward heads; who says how many tokens there are
kernels, nf4, stored4bit/ the arithmetic of terms; 4-bit bases as training saw them, or as stored
folding, hashing, native/ a LoRA without torch; sha256 of many tensors at once; both in C
quantize, encode          compressed-tensors, for serving
deepspeed/, pickled/      DeepSpeed's checkpoints; torch.save's files, read without running them
tokenizer                 which ids end a text
worker                    what needs heavy imports, as requests a warm process can answer
"""
