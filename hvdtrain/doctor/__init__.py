"""Are this machine and all hosts fit for training? Facts, then findings, then a table.

`probe.py` collects the `facts.py` of each host; `judge_host.py` and `judge_together.py` make
findings of facts and touch nothing; `examine.py` runs both.
"""
