"""One run of a flow: its task runs, records and summary.

    with in_prefect("rlhf", composed) as host:
        flow_run = FlowRun.begin("rlhf", composed, host, tracker=tracker_of(composed))
        flow_run.run(title, stages)  # calls stages(flow_run)

flow_body      runs a flow with a Prefect server; errors of ours become its state and exit status
prefect_tasks  stages as task runs, with the edges of the flow graph
flow_run       logs, GPUs, the tracked run, and a summary that is written however the run ends
summary        the summary of a run, with the numbers before and after training
"""
