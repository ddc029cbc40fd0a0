"""Find the module in which two models part (`flows/bisect.py`).

    report = bisect(ModelRef(a), ModelRef(b), Options(texts=[...]), log=log, log_path=path)
    report.verdict, report.divergences[0].module, report.divergences[0].cause

Every module of b gets the inputs that it had in a, so that a difference stays where it arises.

run        bisect two folders: load both in a child process, compare, judge
compare    record the calls of a model's modules, replay them in another model
tensors    compare two tensors: equal, rounded to a format, or different, and why
report     the result: verdict, text and JSON
"""
