"""Kill a launcher: no rank stays.

Start it by `python examples/asked/06_no_orphans.py`. With `torchrun` at its end it kills torchrun
instead, whose ranks go on.
"""

import os
import signal
import subprocess
import sys
import time

fastdist_run = ("-m", "fastdist", "run", "-n", "2", "--no-prefix")
torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
launcher = torchrun if sys.argv[1:] == ["torchrun"] else fastdist_run
rank = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
job = subprocess.Popen(
    [sys.executable, *launcher, sys.executable, "-c", rank], stdout=subprocess.PIPE, text=True
)
ranks = [int(job.stdout.readline()) for _ in range(2)]


def alive():
    return [pid for pid in ranks if os.path.exists(f"/proc/{pid}")]


assert alive() == ranks
job.send_signal(signal.SIGKILL)  # not even a handler of a signal can run
job.wait()
for _ in range(50):
    if alive():
        time.sleep(0.1)
left = alive()
for pid in left:
    os.kill(pid, signal.SIGKILL)
print(f"ranks {ranks}; left after the launcher was killed: {left}")
sys.exit(bool(left))
