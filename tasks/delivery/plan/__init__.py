"""Plan a delivery: all decisions and checks, made before a byte is written.

planning       plan and validate all operations on tensors
adapters       read the settings `source` and `adapters`
identity       find the base of SOURCE, and refuse a wrong one
quantization   decide between the original and the dequantized base, with `evidence` of the trainer
comparing      measure the difference between the two (`merge.base=compare`)
work           the request and the plans as plain data
"""
