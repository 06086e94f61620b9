"""Interception of torch's functions while a run is traced for all devices of a mesh.

Random numbers: a traced random function would draw the same numbers on every device. Random numbers
are therefore drawn as a global tensor with a row per replica, and each replica takes its row: the
drawing operations inside torch's random functions are replaced.

Padded batches: see padding.py.

The values of a tensor exist only after the program has run. Reading them earlier is refused. A
traced tensor that outlives the trace (in a list, in the frames of an exception) becomes a readable
tensor with the values of replica 0, since reading a traced tensor makes XLA end the process.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastdist.errors import UnsupportedError
from fastdist.tpu.mesh import Mesh
from fastdist.tpu.padding import Padding, Place

_MAKERS = ("rand", "randn", "randint", "randperm", "normal")


class ReplicaFunctions(TorchFunctionMode):
    """Intercepts torch's functions while a run is traced."""

    def __init__(self, mesh: Mesh, padding: Padding | None) -> None:
        super().__init__()
        self.is_suspended = False  # in cross-replica context
        self._mesh = mesh
        self._padding = padding
        self._draws = _ReplicaDraws(mesh)
        self._made: list[weakref.ref[torch.Tensor]] = []

    def watch(self, tensor: torch.Tensor) -> None:
        """Record a traced tensor, which stands for a tensor of each replica."""
        if tensor.device.type == "xla":
            self._made.append(weakref.ref(tensor))

    def release(self, kept: set[int]) -> None:
        """At the end of the trace, make its living tensors readable, except the ids in `kept`."""
        for made in self._made:
            tensor = made()
            if tensor is not None and id(tensor) not in kept:
                with torch.no_grad():
                    tensor.data = self._mesh.leave(tensor)
        self._made.clear()

    def sizes_of(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Return the number of rows that are examples, per replica; None if all rows are."""
        if self._padding is None or self._padding.place_in(tensor) != (0, 1):
            return None
        return self._padding.sizes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_suspended:
            return func(*args, **kwargs)
        if self._mesh.size == 1:  # one replica: values can be read
            return self._traced(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__repr__", "__format__"):
            return f"<traced tensor of shape {tuple(args[0].shape)}>"
        if name in _READS and _reads(name, args, kwargs):
            raise UnsupportedError(
                f"{name} needs a tensor's values while run traces its function, before they "
                "exist: return the tensor and read it outside run, or select by torch.where"
            )
        result = self._drawn(name, func, args, kwargs)
        for tensor in result if type(result) in (tuple, list) else [result]:
            if type(tensor) is torch.Tensor:
                self.watch(tensor)
        return result

    def _drawn(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in _RANDOM_FUNCTIONS and kwargs.get("generator") is None:
            if name in _MAKERS and kwargs.get("device") is None and not any(map(_is_tensor, args)):
                kwargs = kwargs | {"device": self._mesh.device}
            elif not name.endswith("_"):
                args = tuple(self._here(value) for value in args)
            with self._draws:
                return self._traced(func, args, kwargs)
        return self._traced(func, args, kwargs)

    def _traced(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if func is F.batch_norm:
            return _batch_norm(self._padding, func, args, kwargs)
        if self._padding is None:
            return func(*args, **kwargs)
        return self._padding.call(func, args, kwargs)

    def _here(self, value: Any) -> Any:
        is_elsewhere = isinstance(value, torch.Tensor) and value.device.type != "xla"
        return value.to(self._mesh.device) if is_elsewhere else value


class _ReplicaDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces operations that draw random numbers by operations that draw for all replicas."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh = mesh

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        plain = {key: value for key, value in kwargs.items() if key != "generator"}
        if name in _IN_PLACE:
            tensor, *rest = args
            if tensor.device.type != "xla":  # for example a module that is made in a run
                return func(*args, **kwargs)
            if rest and isinstance(rest[0], torch.Tensor):  # bernoulli_(p)
                return tensor.copy_(self._uniform(tensor) < rest[0])
            tensor.copy_(self._own(lambda t: func(t, *rest, **kwargs), tensor))
            return tensor
        if name in _LIKE:
            made = torch.empty_like(args[0], **plain)
            return self._own(lambda t: getattr(t, _LIKE[name])(*args[1:]), made)
        if name in _SHAPED:
            *limits, size = args  # randint alone has limits
            dtype = {"dtype": torch.int64} if limits else {}
            low = [0] if len(limits) == 1 else []
            made = torch.empty(size, **{**dtype, **plain})
            return self._own(lambda t: getattr(t, _SHAPED[name])(*low, *limits), made)
        if name == "randperm":
            made = torch.empty(args[0], device=kwargs.get("device"))
            return self._uniform(made).argsort().to(kwargs.get("dtype") or torch.int64)
        if name == "bernoulli":
            chance = args[0] if len(args) == 1 else torch.full_like(args[0], args[1])
            return (self._uniform(chance) < chance).to(chance.dtype)
        if name == "normal" and any(map(_is_tensor, args)):
            mean, deviation = args
            like = torch.as_tensor(mean + deviation * 0)
            return mean + deviation * self._own(lambda t: t.normal_(), torch.empty_like(like))
        if name == "multinomial":
            chances, count, *replacement = args
            if count != 1 and any(replacement):
                raise UnsupportedError("multinomial with replacement is not supported on XLA")
            keys = self._own(lambda t: t.exponential_(), torch.empty_like(chances))
            return (chances / keys).topk(count, dim=-1).indices
        raise UnsupportedError(
            f"{func} draws random numbers, which is not supported in replicas of an XLA program; "
            "draw with torch.rand, randn, randint, bernoulli, normal_ or exponential_"
        )

    def _uniform(self, like: torch.Tensor) -> torch.Tensor:
        return self._own(lambda t: t.uniform_(), torch.empty_like(like))

    def _own(
        self, draw: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """Draw into a tensor with a row per replica, and return each replica's row."""
        rows = like.new_empty((self._mesh.size, *like.shape), device=self._mesh.device)
        return self._mesh.enter(draw(rows), True)


def _reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call reads the values of traced tensors."""
    given = [value for value in args if isinstance(value, torch.Tensor)]
    if not any(tensor.device.type == "xla" for tensor in given):
        return False
    if name == "to":
        wanted = (*args[1:2], kwargs.get("device"))
        return any(str(place).startswith("cpu") for place in wanted if not _is_tensor(place))
    if name == "copy_":
        return given[0].device.type != "xla"
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(_is_tensor(i) and i.dtype == torch.bool for i in index)
    return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_READS = frozenset(
    {"item", "tolist", "cpu", "numpy", "to", "copy_", "is_nonzero", "equal", "allclose", "nonzero",
     "argwhere", "unique", "unique_consecutive", "masked_select", "__getitem__", "__bool__",
     "__float__", "__int__", "__index__", "__array__", "__contains__", "bincount"}
)  # fmt: skip
_IN_PLACE = frozenset(
    {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_",
     "geometric_"}
)  # fmt: skip
_LIKE = {
    **{"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"},
    **{"normal_functional": "normal_", "uniform": "uniform_", "exponential": "exponential_"},
    **{"random": "random_", "log_normal": "log_normal_", "cauchy": "cauchy_"},
}
_SHAPED = {"rand": "uniform_", "randn": "normal_", "randint": "random_"}


_RANDOM_FUNCTIONS = frozenset(
    f"{name}{suffix}"
    for name in (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"),
        *("feature_alpha_dropout", "native_dropout", "rrelu", "gumbel_softmax"),
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
        *("rnn_tanh", "rnn_relu", "lstm", "gru", "fractional_max_pool2d", "fractional_max_pool3d"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
        *("bernoulli", "binomial", "multinomial", "normal", "poisson", "random", "uniform"),
        *("kaiming_normal", "kaiming_uniform", "pca_lowrank", "svd_lowrank"),
        *("cauchy", "exponential", "geometric", "log_normal"),
        *("_standard_gamma", "_sample_dirichlet"),
    )
    for suffix in ("", "_")
)


_BATCH_NORM = inspect.signature(F.batch_norm)


def _batch_norm(
    padding: Padding | None, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Compute `torch.nn.functional.batch_norm` over the rows that are examples.

    torch_xla's own batch norm updates the running variance by the biased variance, and would
    include padding.
    """
    bound = _BATCH_NORM.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    value: torch.Tensor = given["input"]
    place = None if padding is None else padding.place_in(value)
    if given["training"]:
        result = _normalized(padding, value, place, given)
    else:
        result = func(*args, **kwargs)
    if padding is not None and place is not None:
        padding.follow(result, *place)
    return result


def _normalized(
    padding: Padding | None, value: torch.Tensor, place: Place | None, given: dict[str, Any]
) -> torch.Tensor:
    axes = [axis for axis in range(value.dim()) if axis != 1]
    shape = (1, -1, *(1,) * (value.dim() - 2))
    each = value.numel() // max(1, value.shape[1])
    if padding is None or place is None:
        mean = value.mean(axes)
        variance = (value - mean.view(shape)).square().mean(axes)
        correction: Any = each / max(1, each - 1)
    else:
        mask = padding.mask_for(value, place)
        count = padding.count.clamp(min=1) * (each / padding.rows)
        mean = torch.where(mask, value, 0).sum(axes) / count
        squares = torch.where(mask, (value - mean.view(shape)).square(), 0)
        variance = squares.sum(axes) / count
        correction = count / (count - 1).clamp(min=1)
    if given["running_mean"] is not None:
        rate = given["momentum"]
        with torch.no_grad():
            for name, new in (("running_mean", mean), ("running_var", variance * correction)):
                given[name].mul_(1 - rate).add_(new.detach().to(given[name].dtype) * rate)
    result = (value - mean.view(shape)) * torch.rsqrt(variance + given["eps"]).view(shape)
    if given["weight"] is not None:
        result = result * given["weight"].view(shape)
    if given["bias"] is not None:
        result = result + given["bias"].view(shape)
    return result.to(value.dtype)
