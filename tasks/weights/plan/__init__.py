"""The plan of a gather, merge or convert, made and checked before a byte is written.

operations    `Plan` and `Op`: one operation per output tensor, as plain data
contracts     `model_facts`: the tensors that a model class expects
validate      `validate`: check a plan from headers, every finding in one error
layout        output files of a plan, and input files that can be linked instead
"""
