"""N ranks from a notebook: `launcher.py` starts them, `rank.py` is their program.

`call.py` is what goes from one to the other: files in a folder that only this user can enter.
`pickles.py` makes what lies in them from what is defined in cells.
"""
