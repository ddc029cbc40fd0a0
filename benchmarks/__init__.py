"""Benchmarks of Plumbline beside other tools; each contender runs in its own process.

weights    `make bench-weights`: merge, gather, convert, plan, ZeRO-3 conversion
training   `make bench-training`: SFT and DPO
rl         `make bench-rl`: rollouts, weight sync, GRPO iterations
gpu        `make bench-gpu`: the rows of all three on one GPU
resolve    `python -m benchmarks.resolve`: a finished stage among 1,000 artifacts
witness    `python -m benchmarks.witness`: cost of a record in a training
contenders/    the code that they time; `harness` runs it, `inputs` and `synthetic` make its inputs
"""
