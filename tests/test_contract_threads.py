"""The contract of communicators, with ranks as threads of one process."""

from contract import CommunicatorContract
from ranks import ThreadRanks


class TestThreads(CommunicatorContract):
    ranks_class = ThreadRanks
