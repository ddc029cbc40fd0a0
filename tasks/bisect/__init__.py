"""Find the module in which two models part (`flows/bisect.py`).

Every module of b gets the inputs that it had in a, so that a difference stays where it arises.

run        bisect two folders in a child process, from this one
child      load both models and compare them
compare    compare two loaded models module by module, and judge the differences
calls      a model's modules by name: record their calls, replay them in another model
tensors    compare two tensors: equal, rounded to a format, or different, and why
report     the result: verdict, text and JSON
"""
