"""Quantized weights: bases stored in few bits, bases as QLoRA training saw them, models to serve.

packed         find, check and decode matrices in 4 bits, and in 8-bit floats with scales;
               `open_model`: such a base looks decoded, operations decode it (`Op.packed`)
config_fields  how weights are stored, from config.json
nf4            quantize a base to 4 bits and back, as QLoRA training did
quantize       8 bits to serve, by compressed-tensors

A merge writes an ordinary model: `quantization_config` is removed from its config.json.
"""
