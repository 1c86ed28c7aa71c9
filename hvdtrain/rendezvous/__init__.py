"""How the processes of a job find each other before they can communicate, without TensorFlow.

`server.py` is the key-value store over HTTP that Horovod's Gloo expects, a separate program that
`serve.py` starts: from our launcher, or from rank 0 where the starter serves none (`bootstrap.py`);
horovodrun serves its own. `client.py` reads and writes it, `barrier.py` waits there for all ranks
and exchanges texts, and `secret.py` authenticates ranks.
"""
