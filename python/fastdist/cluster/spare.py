"""A process of a job with --keep that waits to become a replica: started alone, without fastdist.

    python spare.py PROGRAM ARGUMENT...

It tells the roster its slot and its machine's cores (`roster.py`), waits, and becomes the program.
"""

import json
import os
import socket
import sys


def main() -> None:
    """Wait for the roster's word."""
    place = json.loads(os.environ["FASTDIST_ROSTER"])
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"\0{place['name']}")
            spare = [place["slot"], len(os.sched_getaffinity(0))]
            connection.sendall(json.dumps({"spare": spare}).encode() + b"\n")
            said = connection.makefile().readline()
        except ConnectionError:
            said = ""
    if "start" not in said:  # the job has ended, or its launcher
        sys.exit(0 if said else 1)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main()
