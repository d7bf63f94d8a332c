"""Timing, closed forms, plots and reports: what speculation should save, and what it did save."""
