"""Messages for arguments and names of other libraries that fastdist does not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, NoReturn

from fastdist.collectives.types import REDUCE_OPS

_OTHER_NAMES = {
    "add": "sum",
    "average": "mean",
    "avg": "mean",
    "band": "and",
    "bor": "or",
    "bxor": "xor",
    "maximum": "max",
    "minimum": "min",
    "product": "prod",
}
_OTHER_KEYWORDS = {
    "batch_size": "global_batch_size=, the examples of all replicas together",
    "drop_last": "drop_remainder=",
    "communication": "options=",
    "communication_options": "options=",
    "cross_device_ops": "nothing in its place: collectives choose their way",
    "num_replicas": 'devices=, one for each replica, such as ["cpu:0", "cpu:1"]',
    "options": "MirroredStrategy or MultiWorkerMirroredStrategy, which take them",
}
_OTHER_RANKS = frozenset({"dest", "dst", "source", "src", "root"})
_OBJECTS = (
    "objects go by broadcast_object, all_gather_object, gather_object, scatter_object, send_object"
)
_OTHER_CALLS = {  # and attributes; "_" is left out of names that differ from ours by it alone
    "alltoallw": "all_to_all(…, splits=…)",
    "bcast": "broadcast",
    "create_group": "subgroup",
    "dup": "split(0)",
    "exscan": "scan(…, exclusive=True)",
    "free": "close",
    "get_rank": "rank",
    "get_size": "world_size",
    "get_world_size": "world_size",
    "iprobe": "recv_any",  # which asks without receiving
    "probe": "recv_any",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_block": "reduce_scatter",
    "sendrecv": "send and recv in a group",
    "sendrecv_replace": "send and recv in a group",
    "size": "world_size",
}
_WITH_SPLITS = "gather", "scatter", "all_gather", "all_to_all", "reduce_scatter"
_IMMUTABLE = frozenset({"jax", "jaxlib", "pyarrow", "tensorflow"})


def not_an_array(argument: str, got: Any) -> str:
    """Return the message for an object that is no array."""
    if isinstance(got, (Number, list, tuple)):
        hint = "; pass numpy.array(x)"
    elif isinstance(got, Iterator):
        hint = "; pass a list of arrays"
    elif isinstance(got, dict):
        hint = f"; pass list(x.values()) if it holds arrays; {_OBJECTS}"
    elif hasattr(got, "to_numpy"):
        hint = "; pass x.to_numpy()"
    else:
        hint = f"; {_OBJECTS}"
    name = type(got).__name__
    return f"{argument} must be a numpy, torch or other DLPack array, got {name}{hint}"


def unknown_op(op: Any, known: Iterable[str] = REDUCE_OPS) -> str:
    """Return the message for an unknown reduction, such as `torch.distributed.ReduceOp.AVG`."""
    name = str(getattr(op, "__name__", op)).rpartition(".")[2].lower()
    name = _OTHER_NAMES.get(name, name)
    *others, last = known
    hint = f'; use op="{name}"' if name in (*others, last) else ""
    return f"op must be {', '.join(others)} or {last}, got {op!r}{hint}"


def unknown_name(owner: str, name: str, known: Iterable[str], others: Mapping[str, str]) -> str:
    """Return the message for an attribute that does not exist, other than those `known`.

    `others` tells what to use instead of other libraries' names, which it has in lower case without
    underscores.
    """
    plain = _squeezed(name.removeprefix("experimental_"))
    found = others.get(plain) or next((ours for ours in known if _squeezed(ours) == plain), None)
    hint = "" if found is None else f"; use {found}"
    return f"{owner} has no attribute {name!r}{hint}"


def refuse_other_names(communicator: type) -> frozenset[str]:
    """Let attributes with MPI's and torch.distributed's names raise errors that name ours.

    They cost the communicator's attributes nothing. With `__getattr__` CPython 3.11 would look up
    every attribute the slow way, which takes a quarter of the time of a small collective.
    """
    public = [name for name in dir(communicator) if not name.startswith("_")]
    may_be_async = {
        name
        for name in public
        if "async_op" in (getattr(getattr(communicator, name), "__kwdefaults__", None) or ())
    }
    names = {_squeezed(ours): ours for ours in public} | _OTHER_CALLS
    names |= {f"{_squeezed(ours)}v": f"{ours}(…, splits=…)" for ours in _WITH_SPLITS}
    names = {
        f"i{name}": f"{ours}(…, async_op=True)" if ours in may_be_async else ours
        for name, ours in names.items()
    } | names
    names |= {name.capitalize(): ours for name, ours in names.items()}
    names = {name: ours for name, ours in names.items() if name not in public}
    for name, ours in names.items():
        of_objects = f"{ours}_object"
        also = f", or {of_objects}" if name.islower() and of_objects in public else ""
        setattr(communicator, name, _OtherName(name, ours + also))
    return frozenset(names)


class _OtherName:
    """A class attribute that does not exist, under a name that another library has for ours."""

    def __init__(self, name: str, ours: str) -> None:
        self._name, self._ours = name, ours

    def __get__(self, instance: object, owner: type) -> NoReturn:
        message = f"a {owner.__name__} has no attribute {self._name!r}; use {self._ours}"
        raise AttributeError(message, name=self._name, obj=owner if instance is None else instance)


def _squeezed(name: str) -> str:
    return name.replace("_", "").lower()


def refuse_keywords(call: str, unknown: Mapping[str, Any]) -> None:
    """Raise TypeError if a call got keywords that it does not take."""
    for name in unknown:
        ours = _OTHER_KEYWORDS.get(name)
        if name in _OTHER_RANKS:
            ours = "dst=" if "send" in call else "src=" if "recv" in call else "root="
        hint = f"; use {ours}" if ours else ""
        raise TypeError(f"{call} got an unexpected keyword argument {name!r}{hint}")


def immutable(argument: str, got: Any) -> str:
    """Return the message for an array that must not be changed; "" for other arrays."""
    if not is_immutable(got):
        return ""
    library = type(got).__module__.partition(".")[0].removesuffix("lib")
    return (
        f"{argument} must be writable, got an array of {library}, whose arrays never change; use "
        "out=, or take the result of the call"
    )


def is_immutable(arrays: Any) -> bool:
    """Return True if the library of an array, or of one in a list, never changes its arrays."""
    if isinstance(arrays, (list, tuple)):
        return any(map(is_immutable, arrays))
    return type(arrays).__module__.partition(".")[0] in _IMMUTABLE
