"""Find the module in which two models part (`flows/bisect.py`).

Every module of b gets the inputs that it had in a, so that a difference stays where it arises.

run        bisect two folders in a child process, from this one
child      load both models and compare them
calls      record a model's module calls; replay them in another model
modules    the modules of a model by name, and the weights that each computes with
tensors    compare two tensors: equal, rounded to a format, or different
causes     likely causes of a difference, and what to type
report     the result: verdict, text and JSON
"""
