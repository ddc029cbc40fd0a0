"""The chain of `flows/rlhf.py`: the stages of one model, and the steps (SFT, reward, PPO) in turn.

run_chain     compose, check, run, judge, register
steps         section `chain`: which models are trained one after the other
chain         which stage reads what; `stages` declares them, `train` and `smoke` set two of them up
"""
