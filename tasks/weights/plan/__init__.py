"""The plan of a gather, merge or convert, made and checked before a byte is written.

operations    one operation per output tensor
validate      every finding in one error
"""
