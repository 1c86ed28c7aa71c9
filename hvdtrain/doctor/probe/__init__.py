"""Runs on each host, sent through standard input: standard library only, nothing is installed."""
