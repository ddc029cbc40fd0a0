"""Write `<paths.runs>/reports/<run>/report.html`: one page about one run, without a network.

collect   reads what the run has left: summary, progress, contracts, curves, samples
figures   draws curves and histograms as SVG; imports matplotlib when it draws
results   results of the evaluation row by row, and bootstrap intervals of their differences
compare   differences of two runs
page      fills `report.html.jinja`
"""
