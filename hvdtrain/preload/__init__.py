"""A process that has imported TensorFlow, has run nothing, and forks ranks from itself.

`server.py` imports and forks; `child.py` makes a fork equal to a new process; `client.py` starts
the server and requests forks. A fork starts in 0.1 s, the imports of a new process take seconds.
"""
