"""Run what `flows/rlhf.py` asks for: the stages of a model, once for every step (SFT, reward, PPO).

run_chain     command and flow: compose, check, run; `register` applies the gate and registers
steps         setting `steps`: the models that are trained one after the other
chain         the stages of one model
handoff       the stages after training, which `deliver` runs, too
plan          `plan=true`, and the checks that every run has to pass
"""
