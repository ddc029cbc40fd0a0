"""Files of a checkpoint: headers, indexes, tensor sources. Reads no tensor data.

opening       `open_model`: any supported folder of a full model
reader        `read_checkpoint`: a folder of safetensors files
folder        `inspect_checkpoint`: the files of a Hugging Face model and their problems
side_files    the allowlist of files beside the weights, and the way to copy them
names         names of one tensor in a live model, a PEFT file and a base checkpoint
"""
