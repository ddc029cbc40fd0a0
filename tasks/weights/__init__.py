"""Tensors on disk. Knows no trainer, no Prefect, no MLflow; torch only where numbers are computed.

header, reader, writer    one file; a folder of them; writing one as a stream
names, partitions         what a tensor is called; every rank's slices into whole tensors
contracts                 what must be there, asked of the model's class on the meta device
merge_plan, merge_run     one operation a tensor, planned from headers; then computed
fold, nf4                 the arithmetic: W + scale * B @ A; the base as 4-bit training saw it
relayout, tokenizer       other shards or dtypes, or links; which ids end a text
worker                    what needs heavy imports, as requests a warm process can answer
"""
