"""From a finished run to a model in use.

gate        conditions on the numbers of a run, judged before the model is registered
model_card  README.md of a served folder
"""
