"""Run what `flows/rlhf.py` asks for: the stages of a model, once for every step (SFT, reward, PPO).

run_chain     the flow: compose, check, run; `register` applies the gate and registers
steps         setting `steps`: the models that are trained one after the other
chain         the stages of one model; `train` prepares one of them
handoff       the stages after training, which `deliver` runs, too
dry_run       reports what a run would do, for a plan
"""
