"""The contract, ranks being threads of one process."""

from contract import CommunicatorContract
from ranks import ThreadRanks


class TestThreads(CommunicatorContract):
    ranks_class = ThreadRanks
