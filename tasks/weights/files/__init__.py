"""Files of a checkpoint: headers, indexes, ranges. Loads no tensor as a whole.

tensors       `Tensors`: shape, dtype and byte ranges by key; `Reader` reads ranges
reader        `read_checkpoint`: a folder of safetensors files; `Weights`: what is wrong with it
folder        `model_files`: the files of a Hugging Face model; those that may be copied; whether a
              base is the one that an adapter was trained on
dtypes        names, sizes, NaN and zeros, casts
documents     JSON files with a limit on their size, and our manifests
names         names of one tensor in a live model, a PEFT file and a base checkpoint
"""
