"""The contract, bound to the engines that connect machines; ranks are threads of this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import contract
import numpy as np
import pytest
from contract import CommunicatorContract
from fastdist import Communicator
from fastdist.engines.engine import Engine
from fastdist.engines.gloo import GlooEngine
from fastdist.engines.hierarchical import HierarchicalEngine
from fastdist.engines.host import HostEngine
from fastdist.engines.links import Layout
from fastdist.engines.machine_links import MachineLinks
from fastdist.engines.replicas import engines_over_threads
from ranks import ThreadRanks, run_threads
from reference import SMALL_FLOATS, reduced, sample

torch = pytest.importorskip("torch")

TIMEOUT_S = 60.0
# Which ranks share a machine, by size of the world; not contiguous where possible.
MACHINES = {2: ((0,), (1,)), 3: ((0, 2), (1,)), 4: ((0, 3), (1, 2))}
_names = itertools.count()
_store = torch.distributed.HashStore()
