"""Say what runs do and did, from files under `paths.runs`: no server is asked.

run_record   written while a run goes on: `<paths.runs>/reports/<run>/progress.json`
run_history  reads these records and summaries: what runs, what ended, and how
"""
