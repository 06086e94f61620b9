"""Functions and the objects that they refer to, pickled once and sent to workers by number."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from fastdist.errors import FastdistError
from fastdist.ps.coordinator.remote_value import RemoteTraceback, identity

T = TypeVar("T")

Token = tuple[int, int | None]  # the number of a definition, and of a part; None for the whole
Reduction = tuple[Any, ...]  # as `__reduce__` returns it
Part = tuple[str, Any]  # a description for users, and the object

# Any other error comes from the pickled objects.
_PICKLING_ERRORS = (TypeError, AttributeError, RecursionError, pickle.PicklingError)

reducers: list[Callable[[Any], Reduction | None]] = []
"""Each returns the reduction of an object of another framework, or None for any other object."""


@dataclass(frozen=True, eq=False, repr=False)
class Definition:
    """An object that workers keep."""

    number: int
    blob: bytes  # a pickle of a callable without arguments that makes it
    needs: tuple[Definition, ...]  # the definitions that it refers to
    has_state: bool  # it, or a definition that it needs, has values that workers share


class Definitions:
    """All objects that calls refer to; unreferenced ones are forgotten."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []  # the thread that tells the workers removes the numbers
        self._numbers = itertools.count(1)
        self._named: dict[int, tuple[Token, Definition]] = {}  # by id
        self._of_function: weakref.WeakKeyDictionary[Any, Definition] = weakref.WeakKeyDictionary()
        self._of_digest: weakref.WeakValueDictionary[bytes, Definition] = (
            weakref.WeakValueDictionary()
        )

    def name(self, thing: Any, definition: Definition, part: int | None = None) -> None:
        """Replace `thing` in pickles by a definition, or by one of its parts, from now on."""
        self._named[id(thing)] = (definition.number, part), definition
        weakref.finalize(thing, self._named.pop, id(thing), None)

    def define(
        self,
        make: Callable[[], Any],
        *,
        replacements: Mapping[int, Reduction] = {},
        is_state: bool = False,
    ) -> Definition:
        """Define what `make`, pickled now, makes on each worker; if it has parts, a sequence.

        `replacements` are reductions of objects in it, by id; `is_state`: workers share its values.
        """
        return self._new(*self.dumps(make, replacements), is_state)

    def function(self, fn: Callable[..., Any]) -> Definition:
        """Define a function with what it closes over now; a TypeError names what prevents it."""
        try:
            known = self._of_function.get(fn)
        except TypeError:  # neither hashable nor weakly referenceable
            known = None
        if known is not None:
            return known
        name = getattr(fn, "__qualname__", type(fn).__name__)
        make = functools.partial(identity, fn)
        blob, needs = pickle_or_explain(self.dumps, make, name, parts_of_function(fn))
        digest = hashlib.sha256(blob).digest()
        definition = self._of_digest.get(digest)
        if definition is None:
            definition = self._of_digest[digest] = self._new(blob, needs)
        if getattr(fn, "__self__", None) is None:  # a bound method only lives for this call
            with contextlib.suppress(TypeError):
                self._of_function[fn] = definition
        return definition

    def dumps(
        self, thing: Any, replacements: Mapping[int, Reduction] = {}
    ) -> tuple[bytes, tuple[Definition, ...]]:
        """Return a pickle, and the definitions that it refers to."""
        file = io.BytesIO()
        pickler = _Pickler(file, self._named, replacements)
        pickler.dump(thing)
        return file.getvalue(), tuple(pickler.needs.values())

    def _new(
        self, blob: bytes, needs: tuple[Definition, ...], is_state: bool = False
    ) -> Definition:
        has_state = is_state or any(needed.has_state for needed in needs)
        definition = Definition(next(self._numbers), blob, needs, has_state)
        weakref.finalize(definition, self.forgotten.append, definition.number)
        return definition


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        named: Mapping[int, tuple[Token, Definition]],
        replacements: Mapping[int, Reduction],
    ) -> None:
        super().__init__(file)
        self._named = named
        self._instead = replacements
        self.needs: dict[int, Definition] = {}

    def persistent_id(self, thing: Any) -> Token | None:
        known = self._named.get(id(thing))
        if known is None:
            return None
        token, definition = known
        self.needs[definition.number] = definition
        return token

    def reducer_override(self, thing: Any) -> Any:
        known = self._instead.get(id(thing))
        if known is not None:
            return known
        reductions = (reduce(thing) for reduce in reducers)
        found = next((reduction for reduction in reductions if reduction is not None), None)
        return super().reducer_override(thing) if found is None else found


class _Unpickler(pickle.Unpickler):
    def __init__(self, blob: bytes, resolve: Callable[[Token], Any]) -> None:
        super().__init__(io.BytesIO(blob))
        self._resolve = resolve

    def persistent_load(self, token: Token) -> Any:
        return self._resolve(token)


class Library:
    """The definitions that a worker has received; objects are made when they are first needed."""

    def __init__(self) -> None:
        self._makers: dict[int, Callable[[], Any]] = {}

    def add(self, number: int, blob: bytes) -> None:
        """Keep a definition; a known number stays as it is."""
        self._makers.setdefault(number, functools.cache(lambda: self.loads(blob)()))

    def forget(self, number: int) -> None:
        """Drop a definition."""
        self._makers.pop(number, None)

    def get(self, token: Token) -> Any:
        """Return the object that a token stands for."""
        number, part = token
        if number not in self._makers:
            raise FastdistError(f"this worker has not received definition {number}")
        made = self._makers[number]()
        return made if part is None else made[part]

    def loads(self, blob: bytes) -> Any:
        """Unpickle the result of `Definitions.dumps`."""
        return _Unpickler(blob, self.get).load()


# --- why something cannot be pickled, for error messages ----------------------------------------


def pickle_or_explain(dumps: Callable[[Any], T], thing: Any, what: str, parts: Iterable[Part]) -> T:
    """Return `dumps(thing)`; raise a TypeError that names the first part that prevents it."""
    try:
        return dumps(thing)
    except _PICKLING_ERRORS as error:
        if isinstance(error.__cause__, RemoteTraceback):  # a remote value's function raised it
            raise
        culprit = next((name for name, part in parts if not _can_pickle(dumps, part)), "it")
        raise TypeError(f"{what} cannot be sent to workers: {culprit}: {error}") from error


def parts_of_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Part]:
    """Yield the arguments of a call."""
    for name, value in (*enumerate(args), *kwargs.items()):
        yield f"argument {name!r}", value


def parts_of_function(fn: Any) -> Iterator[Part]:
    """Yield the objects that a function refers to."""
    if isinstance(fn, functools.partial):
        yield from parts_of_function(fn.func)
        yield from parts_of_arguments(fn.args, fn.keywords)
    elif isinstance(fn, MethodType):
        yield from _attributes("its object's", fn.__self__)
    elif isinstance(fn, FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield f"{name!r}, which it closes over", cell
        for name in fn.__code__.co_names:
            if name in fn.__globals__:
                yield f"the global {name!r}", fn.__globals__[name]
        yield from parts_of_arguments(fn.__defaults__ or (), fn.__kwdefaults__ or {})
    else:
        yield from _attributes("its", fn)


def _attributes(whose: str, thing: Any) -> Iterator[Part]:
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        yield f"{whose} {name!r}", value


def _can_pickle(dumps: Callable[[Any], Any], part: Any) -> bool:
    try:
        dumps(part)
    except Exception:
        return False
    return True
