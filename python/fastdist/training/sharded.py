"""Divides an optimizer's work and states among ranks: each steps for the parameters that it owns.

Ranks own whole tensors, so that the results are those of one optimizer, bit by bit, and rules that
need a whole matrix, such as Muon's, work. Gradients stay complete on all ranks. After a step each
owner broadcasts its parameters to the other ranks.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from fastdist.collectives.communicator import Communicator
from fastdist.errors import UnsupportedError
from fastdist.training.modules import broadcast_state

_WITH_CLOSURES = ("LBFGS", "SAM")  # whose steps `_looks_across` cannot try

_State = dict[str, Any]  # of one parameter


class ShardedStep:
    """Takes the place of the method `step` of an optimizer whose parameters are owned by ranks.

    `step` and `state_dict` of the optimizer become collective calls. `state_dict` returns the
    states of all parameters; `load_state_dict` keeps this rank's of such states, whatever number of
    ranks has saved them.

    Args:
        optimizer: an optimizer whose step changes each tensor by itself.
        connect: returns the communicator of all ranks; None if there is one rank.

    Raises:
        UnsupportedError: the step of a parameter depends on other parameters' gradients.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, connect: Callable[[], Communicator | None]
    ) -> None:
        name = type(optimizer).__name__
        if any(each in name for each in _WITH_CLOSURES) or _looks_across(optimizer):
            raise UnsupportedError(
                f"{name} cannot be divided among ranks: its step of one parameter depends on other "
                "parameters' gradients. Do not shard this optimizer"
            )
        self._connect = connect
        self._owners: dict[torch.Tensor, int] = {}
        self._ranks = 0  # their number when the owners were chosen
        plain = optimizer.step

        def step(own: torch.optim.Optimizer, closure: Any = None) -> Any:
            return self._step(own, plain, closure)

        step.__dict__["_wrapped_by_lr_sched"] = True
        optimizer.__dict__["step"] = types.MethodType(step, optimizer)
        optimizer.register_state_dict_post_hook(self._gather_states)
        optimizer.register_load_state_dict_post_hook(self._keep_own_states)

    @_disable_dynamo
    def _step(
        self, optimizer: torch.optim.Optimizer, plain: Callable[..., Any], closure: Any
    ) -> Any:
        optimizer.__dict__["_opt_called"] = True  # schedulers check this attribute
        workers = self._connect()
        if workers is None:
            return plain(closure)
        groups, rank = optimizer.param_groups, workers.rank
        whole = [group["params"] for group in groups]

        def show() -> None:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

        def hide() -> None:
            stepping = [p for parameters in whole for p in parameters if p.grad is not None]
            self._choose_owners(optimizer, stepping, workers.world_size)
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = [p for p in parameters if self._owners.get(p) == rank]

        def with_all() -> Any:
            show()
            try:
                return closure()
            finally:
                hide()

        hide()
        try:
            result = plain(None if closure is None else with_all)
        finally:
            show()
        self._broadcast(workers, [p for parameters in whole for p in parameters])
        return result

    def _choose_owners(
        self, optimizer: torch.optim.Optimizer, parameters: Collection[torch.Tensor], ranks: int
    ) -> None:
        """Give each parameter without an owner to one: the largest first, to who has least to do.

        All ranks choose alike.
        """
        if ranks != self._ranks:
            self._owners, self._ranks = {}, ranks
        new = [p for p in parameters if p not in self._owners]
        if not new:
            return
        loads = [0] * ranks
        for parameter, owner in self._owners.items():
            loads[owner] += _cost(optimizer, parameter)
        for parameter in sorted(new, key=lambda p: -_cost(optimizer, p)):
            owner = self._owners[parameter] = loads.index(min(loads))
            loads[owner] += _cost(optimizer, parameter)

    def _broadcast(self, workers: Communicator, parameters: list[torch.Tensor]) -> None:
        """Bring the owners' values of parameters that have stepped to all ranks."""
        owned: list[list[torch.Tensor]] = [[] for _ in range(workers.world_size)]
        for parameter in parameters:
            if parameter.grad is not None:
                owned[self._owners[parameter]].append(parameter)
        for owner, own in enumerate(owned):
            if own:
                broadcast_state(workers, own, owner)

    def _gather_states(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Complete the result of `state_dict` by the states that other ranks have."""
        workers = self._connect()
        if workers is None:
            return None
        own: dict[int, _State] = state_dict["state"]
        everyone: list[dict[int, _State]] = workers.all_gather_object(
            {key: _outline(state) for key, state in own.items()}
        )
        whole: dict[int, _State] = {}
        for rank, outlines in enumerate(everyone):
            of_rank = own if rank == workers.rank else outlines
            new = {key: of_rank[key] for key in outlines if key not in whole}
            if rank != workers.rank:
                new = {key: _empty(outline) for key, outline in new.items()}
            _broadcast_states(workers, list(new.values()), rank)
            if rank != workers.rank:
                new = {key: _on_cpu(state) for key, state in new.items()}
            whole |= new
        return {**state_dict, "state": dict(sorted(whole.items()))}

    def _keep_own_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose owners of the states that were loaded, and drop those of other ranks."""
        workers = self._connect()
        self._ranks = 0
        if workers is None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        loaded = [p for p in parameters if p in optimizer.state]
        self._choose_owners(optimizer, loaded, workers.world_size)
        for parameter in loaded:
            if self._owners[parameter] != workers.rank:
                del optimizer.state[parameter]


def _cost(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    """Return a number in proportion to the time of one parameter's step."""
    if "Muon" not in type(optimizer).__name__ or parameter.ndim < 2:
        return parameter.numel()
    rows = len(parameter)
    columns = parameter.numel() // max(rows, 1)
    return max(rows, columns) * min(rows, columns) ** 2  # of products of matrices


@dataclass(frozen=True, slots=True)
class _Absent:
    """Describes a tensor of another rank."""

    shape: torch.Size
    dtype: torch.dtype
    device_type: str


def _outline(state: _State) -> _State:
    """Return a state without its tensors' values; what else it holds is pickled as it is."""
    return {
        key: _Absent(value.shape, value.dtype, value.device.type) if _is_plain(value) else value
        for key, value in state.items()
    }


def _empty(outline: _State) -> _State:
    """Return a state with tensors to receive."""
    return {
        key: torch.empty(value.shape, dtype=value.dtype, device=value.device_type)
        if isinstance(value, _Absent)
        else value
        for key, value in outline.items()
    }


def _on_cpu(state: _State) -> _State:
    """Return another rank's state, which may have no room on the GPU."""
    return {key: value.cpu() if _is_plain(value) else value for key, value in state.items()}


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided


def _broadcast_states(workers: Communicator, states: list[_State], root: int) -> None:
    tensors = [value for state in states for value in state.values() if _is_plain(value)]
    for on_cpu in (True, False):
        there = [tensor for tensor in tensors if tensor.is_cpu == on_cpu]
        broadcast_state(workers, [tensor.contiguous() for tensor in there], root)


def _looks_across(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a twin of the optimizer steps a parameter by other parameters' gradients."""
    stepped = []
    for scale in (1.0, 1e4):
        parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
        for parameter, factor in zip(parameters, (1.0, scale), strict=True):
            parameter.grad = factor * torch.linspace(-1.0, 2.0, 16).view(4, 4)
        nothing = torch.empty(0)
        known = {id(p): nothing for group in optimizer.param_groups for p in group["params"]}
        with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
            torch.manual_seed(0)
            twin = copy.deepcopy(optimizer, {**known, id(optimizer.state): defaultdict(dict)})
            twin.param_groups = [{**twin.param_groups[0], "params": parameters}]
            twin.step()
            stepped.append(parameters[0].detach())
    return len(stepped) == 2 and not torch.equal(*stepped)
