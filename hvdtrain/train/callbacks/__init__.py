"""Callbacks of `fit`: `Coordinator` runs first on every rank, the writers on the chief."""
