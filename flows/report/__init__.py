"""Write `<paths.runs>/reports/<run>/report.html`, compare two runs, and write model cards.

    write_report(runs, "20261123-220458-629c4133", log)     one page, without a network
    compare(collect(a), collect(b)).evaluation              differences with 95 % intervals

collect   reads the files of a run: summary, progress, contracts, curves, samples
results   reads the evaluation row by row; paired bootstrap
figures   draws curves and histograms as SVG
page      fills `report.html.jinja`
compare   compares two runs for `plumbline compare`
card      model card (`README.md`) of a served folder
"""
