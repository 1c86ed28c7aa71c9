"""A rank that commits and goes on as a training does, without TensorFlow.

Counts to the number in its last argument, at 20 a second.
"""

import os
import sys
import time
from pathlib import Path


def newest(folder):
    return max((int(path.name[7:]) for path in folder.glob("commit-*")), default=0)


def main(end):
    folder = Path(os.environ["HVDTRAIN_COMMITS"])
    rank, world = os.environ["HOROVOD_RANK"], os.environ["HVDTRAIN_WORLD"]
    step = newest(folder)
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
