"""The contract of communicators, with ranks as threads of one process."""

from contract import CommunicatorContract
from ranks import ThreadRanks


class TestThreads(CommunicatorContract):
    ranks_class = ThreadRanks
    worlds = (1, 3)
    slow_worlds = (2, 4, 7)
    doomed_worlds = (3,)
    slow_doomed_worlds = (2,)
