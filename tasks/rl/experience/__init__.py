"""The responses of one iteration: sampled, scored, measured, and laid into packed rows.

collect             prompts to scored responses, on all ranks
experience_scoring  log-probabilities, values, KL and advantages
packed_rows         the rows that the update trains on
"""
