"""A program whose replicas run the cases that a test sends; started as users start programs.

Run as `python strategy_server.py SOCKET KIND`. Every replica connects to the test's socket.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Client

import fastdist as fd
import torch
from test_strategies import KINDS


def main() -> None:
    torch.set_num_threads(1)
    address, kind = sys.argv[1:]
    KINDS[kind](fd.CommunicationOptions())  # starts the other replicas, if nobody else has
    with Client(address, "AF_UNIX") as connection:
        while True:
            try:
                case, options = connection.recv()
            except EOFError:
                os._exit(0)  # as in ranks.py
            try:
                strategy = KINDS[kind](fd.CommunicationOptions(**options))
                answer = (False, pickle.loads(case)(strategy))
            except BaseException:
                answer = (True, traceback.format_exc())
            strategy = None
            connection.send(answer)


if __name__ == "__main__":
    main()
