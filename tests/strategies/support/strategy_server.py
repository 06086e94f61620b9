"""A program whose replicas run the cases that a test sends; started as users start programs.

Run as `python strategy_server.py SOCKET KIND`. Every replica connects to the test's socket.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Client

import fastdist as fd
from ranks import serve
from test_strategies import KINDS

if __name__ == "__main__":
    address, kind = sys.argv[1:]
    KINDS[kind](fd.CommunicationOptions())  # starts the other replicas, if nobody else has
    serve(Client(address, "AF_UNIX"), fd.init())
