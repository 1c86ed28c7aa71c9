"""Starts ranks: `plan.py` makes a plan, which is a value and can be shown; `execute.py` runs it."""
