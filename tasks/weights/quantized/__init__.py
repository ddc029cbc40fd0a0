"""Quantized weights: bases stored in 4 bits, bases as QLoRA training saw them, 8-bit export.

source      open a base stored in bitsandbytes' NF4 or FP4; its packed matrices look decoded
            `decoding(plan, sources)` makes a plan decode them (`states` checks, `decode` decodes)
nf4         quantize a base to 4 bits and back, as QLoRA training did
quantize    8-bit export of compressed-tensors for serving (`encode` does the arithmetic)

A merge writes an ordinary model: `quantization_config` is removed from its config.json.
"""
