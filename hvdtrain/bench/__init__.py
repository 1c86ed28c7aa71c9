"""`hvdtrain compare`: measures engines in turn, and compares that with computed bytes and times.

`compare.py` loads no TensorFlow; the runs are processes as users start them.
"""
