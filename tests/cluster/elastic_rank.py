"""A rank that commits and goes on as a training does, without TensorFlow.

Counts to the number in its last argument, at 20 a second. All ranks begin with the number of rank
0, which they read from a file: the argument before is a part of its name.
"""

import os
import sys
import time
from pathlib import Path


def newest(folder):
    return max((int(path.name[7:]) for path in folder.glob("commit-*")), default=0)


def of_rank_0(rank, world, step):
    launcher = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].rpartition("/")[2][:8]
    place = Path("/tmp", f"{sys.argv[-2]}-{launcher}-{world}")  # noqa: S108 - the hosts share it
    if rank == "0":
        spare = place.with_suffix(".new")
        spare.write_text(str(step))
        spare.rename(place)
        return step
    while not place.exists():
        time.sleep(0.01)
    return int(place.read_text())


def main(end):
    folder = Path(os.environ["HVDTRAIN_COMMITS"])
    rank, world = os.environ["HOROVOD_RANK"], os.environ["HVDTRAIN_WORLD"]
    step = of_rank_0(rank, world, newest(folder))
    print(f"up rank {rank} of {os.environ['HOROVOD_SIZE']} on {os.environ['HOROVOD_HOSTNAME']} "
          f"world {world} from {step} pid {os.getpid()}", file=sys.stderr, flush=True)
    while step < end:
        time.sleep(0.05)
        step += 1
        asked = (folder / "change").exists()
        if os.environ["HOROVOD_LOCAL_RANK"] == "0" and (asked or step % 5 == 0):
            before = list(folder.glob("commit-*"))
            temporary = folder / "spare"
            temporary.write_text(str(step))
            temporary.rename(folder / f"commit-{step:012}")
            for path in before:
                path.unlink()
        if asked or "HVDTRAIN_ENDING" in os.environ:
            sys.exit(75)


main(int(sys.argv[-1]))
