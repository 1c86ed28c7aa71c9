"""What programs leave in the memory of this host."""

import os

#: Of other tests that run at the same time: folders of elastic jobs, segments of Open MPI.
_OF_OTHERS = ("hvdtrain-", "vader_", "sm_segment", "osc_", "ompi", "pmix", "prte")


def shared_files() -> set[str]:
    """Names in `/dev/shm`, to compare with those of before; without what others may have there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_OF_OTHERS)}
