"""Is this machine, and is each host, fit for training? Facts, then findings, then a table.

`probe/` looks at a host and runs there; `facts.py` is what it tells; `judge/` makes findings of
facts and touches nothing; `examine.py` brings them together.
"""
