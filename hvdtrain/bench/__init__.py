"""`hvdtrain compare`: one job under several engines, measured alike and set beside arithmetic.

`options` what is asked; `plan` every run as a value; `runner` runs one; `measure` reads what it
left; `summary` puts rounds together; `report` and its neighbours show them.
"""
