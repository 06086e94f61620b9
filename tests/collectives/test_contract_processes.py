"""The contract of communicators, with ranks as processes that share memory."""

from contract import CommunicatorContract
from ranks import ProcessRanks


class TestProcesses(CommunicatorContract):
    ranks_class = ProcessRanks
    worlds = (2, 4)
    slow_worlds = (1, 3, 7)
    doomed_worlds = (2,)
    slow_doomed_worlds = (3,)
