"""Quantized weights: bases stored in 4 bits, bases as QLoRA training saw them, models to serve.

source      open a base stored in bitsandbytes' NF4 or FP4, or in fp8; packed matrices look decoded
            `decoding(plan, sources)` makes a plan decode them (`states` checks, `decode` decodes)
fp8         8-bit floats with scales by row, block or tensor: find them, check shapes, decode
nf4         quantize a base to 4 bits and back, as QLoRA training did
quantize    contract of quantised models; 8 bits by compressed-tensors (`encode`: the arithmetic)
gptq        4 bits by llm-compressor, a program in an environment of its own

A merge writes an ordinary model: `quantization_config` is removed from its config.json.
"""
