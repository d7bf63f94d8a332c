"""Reports: a results directory as one page."""
