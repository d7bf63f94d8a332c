"""Audits: is the output the target's? Each check also runs with a biased rule, to show power."""
