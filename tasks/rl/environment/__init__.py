"""Episodes of several turns: the policy responds, the user's environment answers, until it is done.

episodes             sample and step all episodes of a rank, turn by turn
observation_tokens   the tokens between two responses, by the chat template
process              the class that `rl.environment` names, run by `tasks/rl/user_code.py`
"""
