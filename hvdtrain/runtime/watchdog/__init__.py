"""The watchdog: finds ranks that hang, do not answer or have gone, under every starter.

Each rank has one thread that tells rank 0 how far the rank has come (`progress.py`), over a
connection of its own: neither the training nor its collective is involved. Rank 0 decides
(`judge.py`), and all ranks leave with what was found (`leave.py`).
"""

from hvdtrain.runtime.watchdog.watchdog import Watchdog as Watchdog
from hvdtrain.runtime.watchdog.watchdog import start_watchdog as start_watchdog
