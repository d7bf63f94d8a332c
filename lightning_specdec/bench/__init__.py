"""Measuring: cases, their rows and comparisons, intervals and verdicts, and the theory."""
