"""Checks of everything that only a GPU can show, for the first machine that has one.

    make test-gpu                       one GPU, about 25 minutes
    make test-gpu ARGS='-k fork'        one check; names are in `suite.py`
    python -m pytest tests/gpu -m gpu   the same with the machine's own Python, without `make setup`

`suite.CHECKS` lists the checks in the order of importance, with what each needs. A check is a
function of a `Setting` (device, size); `test_gpu.py` also calls it at a tiny size on a CPU.
"""
