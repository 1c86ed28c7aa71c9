"""A process that has imported TensorFlow and has run nothing, and forks ranks from itself.

`server.py` imports and forks; `child.py` turns a fork into a process of its own; `client.py` starts
such a process and asks it for forks. A fork starts in a tenth of a second, where the
imports of a new process take several. Driver and ranks may use it; it loads nothing heavy but in
the server.
"""
