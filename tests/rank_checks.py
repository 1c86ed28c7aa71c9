"""Assertions that all ranks make together."""


def assert_same_everywhere(session, variables):
    """The variables are bitwise equal on all ranks."""
    from hvdtrain.optim import state
    everyone = session.collective.gather_objects(state.digests(variables))
    assert all(d == everyone[0] for d in everyone)
