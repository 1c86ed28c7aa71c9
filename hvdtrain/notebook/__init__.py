"""N ranks from a notebook: `launcher.py` starts them, `rank.py` is their program.

They exchange the files of `call.py`, in a folder that only this user can enter.
"""
