"""Tensors on disk. Knows no trainer, no Prefect, no MLflow; torch only where numbers are computed.

header, reader, writer    one file; a folder of them; names, headers and offsets of those to come
source, extents, opening  whoever wrote the files: what is there, in which ranges; reading those
plan, terms               one operation a tensor, as plain data; what adapters do to one
validate, layout          everything that headers tell, in one error; where each tensor goes
execute, running          a plan run by several workers, with a journal to go on from
copying, compute, casts   what one tensor costs: a link, a kernel copy, a cast, blocks of rows
names, partitions         what a tensor is called; every rank's slices into whole tensors
contracts                 what must be there, asked of the model's class on the meta device
merge_plan                the plan of a merge of plain LoRA
kernels, nf4              the arithmetic of terms; the base as 4-bit training saw it
tokenizer                 which ids end a text
worker                    what needs heavy imports, as requests a warm process can answer
"""
