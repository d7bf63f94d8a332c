"""Reports: what a results directory says, as one page."""
