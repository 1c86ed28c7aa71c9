"""From facts to findings: pure functions, one for each check."""
