"""Files of a checkpoint: headers, indexes, tensor sources. Loads no tensor as a whole.

source        `Source`: tensors as ranges of files; `Reader` reads ranges
reader        `read_checkpoint`: a folder of weight files; `header` reads one safetensors file's
folder        `inspect_checkpoint`: the files of a Hugging Face model and their problems
dtypes        names, sizes, NaN and zeros, casts
documents     JSON files with a limit on their size, and our manifests
side_files    the allowlist of files beside the weights, and the way to copy them
names         names of one tensor in a live model, a PEFT file and a base checkpoint
identity      whether a base is the one that an adapter was trained on
"""
