"""Child processes: started, listened to, and ended with everything they started.

launch        run a command to its end
json_worker   a process that stays and answers requests
multinode     several machines, one run
"""
