"""Record flows and stages in MLflow; a server that is gone never stops a run.

    tracker = Tracker(uri, "experiment", artifact_root, reports)
    with tracker.flow(name, config, text, tags), tracker.stage("train", origin) as run:
        run.metrics({"train/loss": 1.2}, step=3)

tracker       records of flows and of their stages
outbox        the thread that sends them
mlflow_server the only code that knows MLflow
"""
