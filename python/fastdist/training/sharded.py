"""Divides an optimizer's work and states among ranks: each steps for the parameters that it owns.

Ranks own whole tensors, so that the results are those of one optimizer, bit by bit, and rules that
need a whole matrix, such as Muon's, work. Gradients stay complete on all ranks. After a step each
owner broadcasts its parameters to the other ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch._compile import _disable_dynamo

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.types import Work
from fastdist.collectives.uneven import require_same_call
from fastdist.errors import FastdistError, UnsupportedError
from fastdist.training.communicators import Overlap, agree_on_overlap
from fastdist.training.modules import broadcast_state

_State = dict[str, Any]  # of one parameter
_SHARDED = "_fastdist_sharded"
_PIECES = 4  # of a step, if they overlap
TRIAL_STEPS = 6
# The scales of the gradients in a trial; None is that of the parameter that is looked at.
_BESIDE = (None, 1.0), (None, 1e4), (None, 1e-4), (None,), (1.0, None)
_ACROSS = ("LBFGS", "SAM", "DAdapt")  # a trial needs a closure, or many steps


class ShardedStep:
    """Takes the place of the method `step` of an optimizer whose parameters are owned by ranks.

    `step` and `state_dict` of the optimizer become collective calls. `state_dict` returns the
    states of all parameters; `load_state_dict` keeps this rank's of such states, whatever number of
    ranks has saved them. Every rank must make this object.

    Args:
        optimizer: an optimizer whose step changes each tensor by itself.
        connect: returns the communicator of all ranks; None if there is one rank.
        overlap: parameters are sent while others are stepped; "auto": where cores are idle.
    """

    _wrapped_by_lr_sched = True  # schedulers count steps by `_opt_called`, which is set here

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        connect: Callable[[], Communicator | None],
        overlap: Overlap = "auto",
    ) -> None:
        _require_divisible(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._connect = connect
        self._overlap, self._overlaps = overlap, False
        self._owners: dict[torch.Tensor, int] = {}
        self._loading: dict[torch.Tensor, int] = {}
        self._workers: Communicator | None = None  # when the owners were chosen
        # The communicator, and the ids of the parameters, of the last step.
        self._stepped: tuple[Communicator | None, list[int]] = None, []
        kind = type(optimizer)
        self._plain = getattr(kind.step, "__wrapped__", kind.step)  # without hooks
        self._may_be_cut = _is_of_torch(optimizer) and _is_written_by_torch(self._plain)
        copied = functools.partial(_refuse_copy, kind.__name__)
        methods = {"step": self, "__deepcopy__": copied, "__reduce_ex__": copied}
        optimizer.__dict__ |= methods | {_SHARDED: self}  # programs wrap `step` in their own
        optimizer.register_state_dict_post_hook(self._gather_states)
        optimizer.register_load_state_dict_pre_hook(self._own)
        optimizer.register_load_state_dict_post_hook(self._note_loaded)
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Step; every rank must call."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return _step_with_hooks(optimizer, *args, **kwargs)

    @_disable_dynamo
    def _step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer.__dict__["_opt_called"] = True
        workers = self._connect()
        if workers is None:
            return self._plain(optimizer, *args, **kwargs)
        self._follow(optimizer, workers)
        whole = [group["params"] for group in optimizer.param_groups]

        def show() -> None:
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters

        def hide(stepping: list[torch.Tensor]) -> None:
            own = {p for p in stepping if self._owners[p] == workers.rank}
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = [p for p in parameters if p in own]

        def shown(closure: Callable[[], Any]) -> Any:
            show()
            try:
                return closure()
            finally:
                stepping[:] = self._with_gradients(optimizer, workers)
                hide(stepping)

        stepping = self._with_gradients(optimizer, workers)
        has_closure = True
        if args and callable(args[0]):
            args = (functools.partial(shown, args[0]), *args[1:])
        elif kwargs.get("closure") is not None:
            kwargs["closure"] = functools.partial(shown, kwargs["closure"])
        else:
            has_closure = False
            self._require_same(optimizer, stepping, workers)
        pieces = [stepping] if has_closure else self._pieces(optimizer, stepping, workers)
        result = None
        with contextlib.ExitStack() as sent:  # waits, even if a later piece fails
            for piece in pieces:
                hide(piece)
                try:
                    result = self._plain(optimizer, *args, **kwargs)
                finally:
                    show()
                if has_closure:
                    self._require_same(optimizer, stepping, workers)
                for work in self._send(piece, workers):
                    sent.callback(work.wait)
        return result

    def _with_gradients(
        self, optimizer: torch.optim.Optimizer, workers: Communicator
    ) -> list[torch.Tensor]:
        """Return the parameters that have gradients, all of which have owners then."""
        found = list(dict.fromkeys(p for p in _parameters_of(optimizer) if p.grad is not None))
        self._owners = with_owners(optimizer, self._owners, found, workers.world_size)
        return found

    def _pieces(
        self, optimizer: torch.optim.Optimizer, stepping: list[torch.Tensor], workers: Communicator
    ) -> list[list[torch.Tensor]]:
        """Cut a step in pieces of about equal work for each owner, to send one while it steps.

        The result is the same for torch's optimizers, which count steps by parameter.
        """
        if not self._overlaps or not self._may_be_cut:
            return [stepping]
        costs = [_cost(optimizer, parameter) for parameter in stepping]
        totals = [0] * workers.world_size
        for parameter, cost in zip(stepping, costs, strict=True):
            totals[self._owners[parameter]] += cost
        pieces: list[list[torch.Tensor]] = [[] for _ in range(_PIECES)]
        before = [0] * workers.world_size
        for parameter, cost in zip(stepping, costs, strict=True):
            owner = self._owners[parameter]
            number = _PIECES * before[owner] // max(totals[owner], 1)
            pieces[min(number, _PIECES - 1)].append(parameter)  # without elements: the last
            before[owner] += cost
        return [piece for piece in pieces if piece]

    def _send(self, piece: list[torch.Tensor], workers: Communicator) -> list[Work]:
        """Broadcast parameters by their owners; return what is left to be waited for."""
        sent = []
        for owner in range(workers.world_size):
            own = [p for p in piece if self._owners[p] == owner]
            if own and self._overlaps and all(p.is_contiguous() for p in own):
                values = [p.detach() for p in own]
                sent.append(workers.broadcast(values, owner, async_op=True))
            elif own:
                broadcast_state(workers, own, owner)
        return sent

    def _require_same(
        self, optimizer: torch.optim.Optimizer, stepping: list[torch.Tensor], workers: Communicator
    ) -> None:
        """Check that all ranks step for the same parameters, at first and when they change."""
        stepped = list(map(id, stepping))
        if (workers, stepped) != self._stepped:
            from fastdist.recorder.words import ranges  # only when it is needed

            numbers = {id(p): number for number, p in enumerate(_parameters_of(optimizer))}
            name = f"step of {type(optimizer).__name__}, sharded, with gradients for parameters"
            require_same_call(workers, f"{name} {ranges([numbers[each] for each in stepped])}")
            if workers is not self._stepped[0]:
                self._overlaps = agree_on_overlap(workers, self._overlap)
            self._stepped = workers, stepped

    def _follow(self, optimizer: torch.optim.Optimizer, workers: Communicator) -> None:
        """Move the states to owners among the ranks that there are now."""
        if workers is self._workers:
            return
        had = set(self._owners) if optimizer.state else set()
        if self._workers is not None:
            optimizer.load_state_dict(optimizer.state_dict())
            if not had <= set(self._owners):
                raise FastdistError(
                    f"the states of {len(had - set(self._owners))} parameters of "
                    f"{type(optimizer).__name__} were lost with the rank that had them: restore "
                    "the optimizer on all ranks, from a checkpoint"
                )
        self._workers = workers

    def _gather_states(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Complete the result of `state_dict` by the states that other ranks have."""
        workers = self._connect()
        if workers is None:
            return None
        require_same_call(workers, f"state_dict of {type(optimizer).__name__}, which is sharded")
        parameters = _parameters_of(optimizer)
        own: dict[int, _State] = {
            key: state
            for key, state in state_dict["state"].items()
            if key in range(len(parameters))
        }
        everyone: list[dict[int, _State]] = workers.all_gather_object(
            {key: _outline(state) for key, state in own.items()}
        )
        owners = self._owners if workers is self._workers else {}
        whole: dict[Any, Any] = {  # what belongs to no parameter is the same on all ranks
            key: state for key, state in state_dict["state"].items() if key not in own
        }
        for key in sorted({key for outlines in everyone for key in outlines}):
            having = [rank for rank, outlines in enumerate(everyone) if key in outlines]
            owner = owners.get(parameters[key])
            root = owner if owner in having else having[0]
            known = own[key] if root == workers.rank else None
            whole[key] = _broadcast(workers, known, everyone[root][key], root)
        return {**state_dict, "state": whole}

    def _own(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Choose owners of states that are about to be loaded, and leave out other ranks'."""
        workers = self._connect()
        parameters, states = _parameters_of(optimizer), state_dict.get("state", {})
        if workers is None:
            self._loading = {}
            return state_dict
        numbers = sorted(key for key in states if key in range(len(parameters)))
        loaded = [parameters[number] for number in numbers]
        self._loading = with_owners(optimizer, {}, loaded, workers.world_size)
        others = {n for n in numbers if self._loading[parameters[n]] != workers.rank}
        own = {key: state for key, state in states.items() if key not in others}
        return {**state_dict, "state": own}

    def _note_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._owners, self._workers = self._loading, self._connect()


@torch.optim.Optimizer.profile_hook_step
def _step_with_hooks(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    return vars(optimizer)[_SHARDED]._step(optimizer, *args, **kwargs)


def _refuse_copy(name: str, *_: object) -> NoReturn:
    raise UnsupportedError(
        f"{name} is sharded: a copy would have this rank's states alone; make another optimizer, "
        "and load the state_dict() of this one into it"
    )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def with_owners(
    optimizer: object,
    owners: dict[torch.Tensor, int],
    parameters: Sequence[torch.Tensor],
    ranks: int,
) -> dict[torch.Tensor, int]:
    """Return the owners, with one for each parameter: the largest first, to who has least to do."""
    new = [p for p in parameters if p not in owners]
    if not new:
        return owners
    found, loads = dict(owners), [0] * ranks
    for parameter, owner in owners.items():
        loads[owner] += _cost(optimizer, parameter)
    for parameter in sorted(new, key=lambda p: -_cost(optimizer, p)):
        owner = found[parameter] = loads.index(min(loads))
        loads[owner] += _cost(optimizer, parameter)
    return found


def _cost(optimizer: object, parameter: torch.Tensor) -> int:
    """Return a number in proportion to the time of one parameter's step."""
    if "Muon" not in type(optimizer).__name__ or parameter.ndim < 2:
        return parameter.numel()
    rows = len(parameter)
    columns = parameter.numel() // max(rows, 1)
    return max(rows, columns) * min(rows, columns) ** 2  # of products of matrices


class _Absent(NamedTuple):
    """Describes a tensor of another rank."""

    like: torch.Tensor  # without memory
    device_type: str


def _outline(state: _State) -> _State:
    """Return a state without its tensors' values; what else it holds is pickled as it is."""
    return {
        key: _Absent(value.to("meta"), value.device.type) if _is_plain(value) else value
        for key, value in state.items()
    }


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and torch.ops.aten.is_non_overlapping_and_dense(value)
    )


def _broadcast(workers: Communicator, own: _State | None, outline: _State, root: int) -> _State:
    """Return the root's state: there `own`, elsewhere on the CPU, as a GPU may have no room."""
    state = own
    if state is None:
        state = {
            key: torch.empty_like(value.like, device=value.device_type)
            if isinstance(value, _Absent)
            else value
            for key, value in outline.items()
        }
    tensors = {key: value for key, value in state.items() if _is_plain(value)}
    for on_cpu in (True, False):
        broadcast_state(workers, [t for t in tensors.values() if t.is_cpu == on_cpu], root)
    return state if own is not None else state | {key: t.cpu() for key, t in tensors.items()}


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def _is_written_by_torch(function: Any) -> bool:
    """Return False if the function, or one that it wraps, is of another package."""
    while function is not None:
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _require_divisible(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer steps each parameter by itself."""
    name = type(optimizer).__name__
    replaced = vars(optimizer).get("step")
    wrapped = getattr(replaced, "__wrapped__", None)  # by a scheduler
    if replaced is not None and getattr(wrapped, "__func__", wrapped) is not type(optimizer).step:
        raise UnsupportedError(
            f"the method step of this {name} has been replaced, and would not be called: replace "
            "it after the scope"
        )
    if _is_of_torch(optimizer) and name != "LBFGS":
        return
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        raise UnsupportedError(
            f"{name} cannot be divided among ranks: its train() and eval() change parameters by "
            "states that other ranks have"
        )
    if any(each in name for each in _ACROSS) or _looks_across(optimizer):
        raise UnsupportedError(
            f"{name} cannot be divided among ranks: its step of one parameter depends on other "
            "parameters' gradients, number or order, or draws random numbers"
        )


def require_own_groups(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that no optimizer steps the groups of another one, as Lookahead does."""
    known: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if (other := known.setdefault(id(group), optimizer)) is not optimizer:
                names = " and ".join(type(each).__name__ for each in (other, optimizer))
                raise UnsupportedError(
                    f"{names} share their groups of parameters: one of them calls the other, and "
                    "they cannot be divided among ranks"
                )


def _looks_across(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a twin of the optimizer steps one parameter otherwise beside others."""
    numbers = [i for i, group in enumerate(optimizer.param_groups) if group["params"]]
    trials = [functools.partial(_trial, optimizer, number) for number in numbers]
    return any(differ(optimizer, trial) for trial in trials)


def differ(optimizer: object, trial: Callable[[Any], list[torch.Tensor]]) -> bool:
    """Return True if trials of an optimizer differ by the scales; warn if one fails."""
    try:
        with torch.random.fork_rng(devices=[]):
            first, *others = map(trial, _BESIDE)
    except Exception as error:
        warnings.warn(
            f"{type(optimizer).__name__} is divided among ranks, which is right only if it steps "
            "each parameter by itself; it could not be tried on small ones: "
            f"{type(error).__name__}: {error}",
            stacklevel=3,
        )
        return False
    return not all(torch.equal(a, b) for one in others for a, b in zip(one, first, strict=True))


def _trial(
    optimizer: torch.optim.Optimizer, number: int, scales: Sequence[float | None]
) -> list[torch.Tensor]:
    """Return the parameter without a scale after steps beside others with these."""
    torch.default_generator.manual_seed(0)
    group = optimizer.param_groups[number]
    like: torch.Tensor = group["params"][0]
    ones = torch.ones(4, 4, dtype=like.dtype, device=like.device)
    parameters = [nn.Parameter(ones.clone()) for _ in scales]
    nothing = torch.empty(0)
    memo: dict[int, Any] = {id(p): nothing for p in _parameters_of(optimizer)}
    others = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    state: defaultdict[Any, Any] = defaultdict(dict, copy.deepcopy(others))
    memo[id(optimizer.state)] = state
    settings = {key: value for key, value in group.items() if key != "params"}
    own = vars(optimizer).items()
    attributes = {k: v for k, v in own if k not in ("param_groups", "step") and "hooks" not in k}
    twin = copy.copy(optimizer)
    twin.__dict__.update(copy.deepcopy(attributes, memo))
    twin.__dict__.update({k: OrderedDict() for k, _ in own if "hooks" in k})
    twin.__dict__.pop("step", None)
    twin.state = state
    twin.param_groups = [copy.deepcopy(settings, memo) | {"params": parameters}]
    step = getattr(type(twin).step, "__wrapped__", type(twin).step)
    for turn in range(TRIAL_STEPS):
        for parameter, scale in zip(parameters, scales, strict=True):
            gradient = torch.linspace(-1.0, 2.0, 16, device=like.device).roll(turn).view(4, 4)
            parameter.grad = ((1.0 if scale is None else scale) * gradient).to(like.dtype)
        step(twin)
    return [parameters[scales.index(None)].detach()]
