"""Functions and the objects that they refer to, pickled once and sent to workers by number."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from fastdist.errors import FastdistError
from fastdist.ps.coordinator.remote_value import identity
from fastdist.ps.coordinator.unpicklable import (
    parts_of_arguments,
    parts_of_function,
    pickle_or_explain,
)

Token = tuple[int, int | None]
"""The number of a definition, and of one of its parts; None for the whole."""
_NOTHING: Mapping[int, tuple[Any, ...]] = {}
Reduction = tuple[Any, ...]

reducers: list[Callable[[Any], Reduction | None]] = []
"""Each returns the reduction of an object of another framework, or None for any other object."""


class Definition:
    """An object that workers keep.

    Attributes:
        number: calls refer to it by this number.
        blob: a pickle of a callable without arguments that makes it.
        needs: the definitions that it refers to.
        has_state: True if it, or a definition that it needs, has values that workers share.
    """

    def __init__(
        self, number: int, blob: bytes, needs: Sequence[Definition], is_state: bool = False
    ) -> None:
        self.number = number
        self.blob = blob
        self.needs = tuple(needs)
        self.has_state: bool = is_state or any(needed.has_state for needed in needs)


class Definitions:
    """All objects that calls refer to; unreferenced ones are forgotten.

    Attributes:
        forgotten: numbers that workers may drop; the thread that tells them removes the numbers.
    """

    def __init__(self) -> None:
        self.forgotten: list[int] = []
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
        replacements: Mapping[int, tuple[Any, ...]] = _NOTHING,
        is_state: bool = False,
    ) -> Definition:
        """Define an object that each worker makes.

        Args:
            make: pickled now, and called without arguments on each worker.
            replacements: by id of objects in it: their reductions, in the form of `__reduce__`.
            is_state: True if it has values that workers share.
        """
        blob, needs = self.dumps(make, replacements)
        return self._new(blob, needs, is_state)

    def function(self, fn: Callable[..., Any]) -> Definition:
        """Define a function with the values that it closes over now.

        Raises:
            TypeError: it cannot be pickled; the message names the variable that prevents it.
        """
        try:
            known = self._of_function.get(fn)
        except TypeError:  # neither hashable nor weakly referenceable
            known = None
        if known is not None:
            return known
        blob, needs = pickle_or_explain(
            self.dumps,
            functools.partial(identity, fn),
            getattr(fn, "__qualname__", type(fn).__name__),
            lambda: parts_of_function(fn),
        )
        digest = hashlib.sha256(blob).digest()
        definition = self._of_digest.get(digest)
        if definition is None:
            definition = self._of_digest[digest] = self._new(blob, needs)
        if getattr(fn, "__self__", None) is None:  # a bound method only lives for this call
            with contextlib.suppress(TypeError):
                self._of_function[fn] = definition
        return definition

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bytes, tuple[Definition, ...]]:
        """Pickle the arguments of a call, see `dumps`.

        Raises:
            TypeError: an argument cannot be pickled; the message names it.
        """
        pickled: tuple[bytes, tuple[Definition, ...]] = pickle_or_explain(
            self.dumps, (args, kwargs), "a call", lambda: parts_of_arguments(args, kwargs)
        )
        return pickled

    def dumps(
        self, thing: Any, replacements: Mapping[int, tuple[Any, ...]] = _NOTHING
    ) -> tuple[bytes, tuple[Definition, ...]]:
        """Return a pickle, and the definitions that it refers to.

        Raises:
            Exception: pickling raised it.
        """
        file = io.BytesIO()
        pickler = _Pickler(file, self._named, replacements)
        pickler.dump(thing)
        return file.getvalue(), tuple(pickler.needs.values())

    def _new(self, blob: bytes, needs: Sequence[Definition], is_state: bool = False) -> Definition:
        definition = Definition(next(self._numbers), blob, needs, is_state)
        weakref.finalize(definition, self.forgotten.append, definition.number)
        return definition


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        named: Mapping[int, tuple[Token, Definition]],
        replacements: Mapping[int, tuple[Any, ...]],
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
    """The definitions that a worker has received; objects are made when they are first needed.

    Args:
        parts: returns the parts of an object that was made, for definitions with parts.
    """

    def __init__(self, parts: Callable[[Any], Sequence[Any]]) -> None:
        self._parts = parts
        self._blobs: dict[int, bytes] = {}
        self._made: dict[int, Any] = {}
        self._parts_of: dict[int, Sequence[Any]] = {}

    def add(self, number: int, blob: bytes) -> None:
        """Keep a definition; a known number stays as it is."""
        self._blobs.setdefault(number, blob)

    def forget(self, number: int) -> None:
        """Drop a definition."""
        self._blobs.pop(number, None)
        self._made.pop(number, None)
        self._parts_of.pop(number, None)

    def clear(self) -> None:
        """Drop all definitions."""
        self._blobs.clear()
        self._made.clear()
        self._parts_of.clear()

    def get(self, token: Token) -> Any:
        """Return the object that a token stands for."""
        number, part = token
        if number not in self._made:
            if number not in self._blobs:
                raise FastdistError(f"this worker has not received definition {number}")
            self._made[number] = self.loads(self._blobs[number])()
        if part is None:
            return self._made[number]
        if number not in self._parts_of:
            self._parts_of[number] = self._parts(self._made[number])
        return self._parts_of[number][part]

    def loads(self, blob: bytes) -> Any:
        """Unpickle the result of `Definitions.dumps`."""
        return _Unpickler(blob, self.get).load()
