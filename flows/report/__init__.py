"""Write `<paths.runs>/reports/<run>/report.html`, and model cards.

    write_report(runs, "20261123-220458-629c4133", log)     one page, without a network

collect   reads the files of a run: summary, progress, contracts, curves, samples
results   reads the evaluation row by row; paired bootstrap
figures   draws curves and histograms as SVG
page      fills `report.html.jinja`
card      model card (`README.md`) of a served folder
"""
