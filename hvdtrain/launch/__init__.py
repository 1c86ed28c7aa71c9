"""Starting ranks: a plan is a value (`plan.py`), shown by `render.py`, done by `execute.py`."""
