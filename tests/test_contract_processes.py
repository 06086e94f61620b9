"""The contract of communicators, with ranks as processes that share memory."""

from contract import CommunicatorContract
from ranks import ProcessRanks


class TestProcesses(CommunicatorContract):
    ranks_class = ProcessRanks
