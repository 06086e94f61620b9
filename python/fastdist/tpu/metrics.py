"""torchmetrics under a strategy whose runs are traced: metrics are updated on the host.

A metric's `update` reads values, which do not exist while a run is traced. Its arguments are
therefore kept, and each replica's part, without padding, updates the metric when its value is read,
or a few runs later.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fastdist.errors import UnsupportedError
from fastdist.replicas.context import state
from fastdist.replicas.per_replica import select
from fastdist.training.metrics import metrics_in

_ADOPTED = "_fastdist_deferred"
_LATEST = 8  # runs whose updates wait, since the devices may still be computing them


class DeferredUpdates:
    """The pending updates of all metrics of one strategy.

    `outside` converts arguments of `update` to values valid after the trace, which `to_host` copies
    to the CPU, as per-replica values, when they are computed.
    """

    def __init__(self, outside: Callable[[Any], Any], to_host: Callable[[Any], Any]) -> None:
        self._outside = outside
        self._to_host = to_host
        self._waiting: deque[tuple[Callable[..., None], Any, tuple[int, ...] | None]] = deque()
        self._replicas = 1

    def adopt(self, roots: Sequence[nn.Module], replicas: int) -> None:
        """Update metrics inside these modules on the host from now on."""
        self._replicas = replicas
        for metric in metrics_in(roots):
            if metric.__dict__.setdefault(_ADOPTED, False):
                continue
            metric.__dict__[_ADOPTED] = True
            for name in ("update", "compute", "reset", "forward", "state_dict"):
                plain = getattr(metric, name)
                instead = self._update if name == "update" else self._after_updates
                metric.__dict__[name] = functools.wraps(plain)(functools.partial(instead, plain))

    def _update(self, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        replica = state.replica
        if replica is None:
            self._after_updates(plain, *args, **kwargs)
        else:
            self._waiting.append((plain, self._outside((args, kwargs)), replica.examples))

    def _after_updates(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if state.replica is not None:
            raise UnsupportedError(
                "in run of TPUStrategy a metric supports update only, since its values are on the "
                "host; call compute, forward and reset outside run"
            )
        self.finish(0)
        return plain(*args, **kwargs)

    def finish(self, waiting: int = _LATEST) -> None:
        """Apply the updates, except the last `waiting` updates."""
        while len(self._waiting) > waiting:
            plain, given, examples = self._waiting.popleft()
            on_host = self._to_host(given)
            for replica in range(self._replicas):
                if examples is None or examples[replica]:
                    args, kwargs = select(on_host, replica)
                    plain(*args, **kwargs)
