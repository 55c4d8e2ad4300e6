"""The opcodes of a pickle in, plain values and the places of numbers out: nothing is imported, nothing is called.

A checkpoint of PyTorch needs few opcodes and fewer names. They are read one by one, and the few things that a
checkpoint is made of are put together here. The name of anything else ends it.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DEPTH, NODES = 50, 5_000_000  # of the settings
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


class RefusedError(Exception):
    """What is wrong with the file."""


class Ordered(dict[Any, Any]):
    """Stands for a dictionary in order."""


class Namespace(dict[Any, Any]):
    """Stands for the options of a program."""


@dataclass(frozen=True)
class Storage:
    kind: str
    key: str


@dataclass(frozen=True)
class Tensor:
    """Which numbers of a storage, by their places."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise RefusedError(f"{value!r} is no size")
    return value


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise RefusedError("a tensor is made of something else than numbers")
    if len(shape) != len(strides) or len(shape) > 8:
        raise RefusedError("a tensor has more sizes than strides")
    return Tensor(storage, whole(offset), tuple(map(whole, shape)), tuple(map(whole, strides)))


def _ordered(pairs: Any = ()) -> Ordered:
    return Ordered((key, value) for key, value in pairs)


def _empty(kind: Any, *_: Any) -> Namespace:
    if kind != "argparse.Namespace":
        raise RefusedError(f"it makes {str(kind)[:80]}, which is no part of a checkpoint")
    return Namespace()


# All that a checkpoint may call, and what is done in its place.
CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch.Size": tuple,
    "collections.OrderedDict": _ordered,
    "copyreg._reconstructor": _empty,
    "copy_reg._reconstructor": _empty,
}
NAMES = {
    *CALLS,
    "argparse.Namespace",
    "builtins.object",
    "__builtin__.object",
    *(f"torch.{name}" for name in (*STORAGES, *DTYPES)),
}


PLAIN = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"),
)
FIXED: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class Machine:
    """The opcodes of a pickle, one method for those that do more than put a plain value on the stack."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for code, argument, _ in pickletools.genops(content):
            name = code.name
            if name in PLAIN:
                self.stack.append(argument)
            elif name in FIXED:
                self.stack.append(FIXED[name])
            elif name == "STOP":
                return self.stack.pop()
            elif (does := getattr(self, f"_{name.lower()}", None)) is not None:
                does(argument)
            elif name not in ("PROTO", "FRAME"):
                raise RefusedError(f"its pickle does what no checkpoint needs: {name}")
        raise RefusedError("its pickle has no end")

    def _since(self) -> list[Any]:
        place = self.marks.pop()
        items = self.stack[place:]
        del self.stack[place:]
        return items

    def _mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _put(self, number: Any) -> None:
        self.memo[int(number)] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _get(self, number: Any) -> None:
        self.stack.append(self.memo[int(number)])

    _binget = _long_binget = _get

    def _empty_list(self, _: Any) -> None:
        self.stack.append([])

    def _empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def _tuple(self, _: Any) -> None:
        items = tuple(self._since())
        self.stack.append(items)

    def _tuple1(self, _: Any) -> None:
        self.stack[-1:] = [tuple(self.stack[-1:])]

    def _tuple2(self, _: Any) -> None:
        self.stack[-2:] = [tuple(self.stack[-2:])]

    def _tuple3(self, _: Any) -> None:
        self.stack[-3:] = [tuple(self.stack[-3:])]

    def _append(self, _: Any) -> None:
        item = self.stack.pop()
        list.append(self.stack[-1], item)

    def _appends(self, _: Any) -> None:
        items = self._since()
        list.extend(self.stack[-1], items)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        dict.__setitem__(self.stack[-1], key, value)

    def _setitems(self, _: Any) -> None:
        items = self._since()
        dict.update(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def _name(self, name: str) -> None:
        if name not in NAMES:
            raise RefusedError(f"it asks for {name}, which is neither numbers nor settings; it was not imported")
        self.stack.append(name)

    def _global(self, both: Any) -> None:
        self._name(".".join(str(both).split(" ", 1)))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(f"{module}.{name}")

    def _reduce(self, _: Any) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or name not in CALLS or not isinstance(arguments, tuple):
            raise RefusedError(f"it calls {str(name)[:80]}, which is no part of a checkpoint; it was not called")
        self.stack.append(CALLS[name](*arguments))

    def _newobj(self, _: Any) -> None:
        self.stack.pop()
        self.stack.append(_empty(self.stack.pop()))

    def _build(self, _: Any) -> None:
        """A namespace gets its values; what else an ordered dictionary knows of itself is left."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], (Namespace, Ordered)) or not isinstance(state, dict):
            raise RefusedError("it changes what it must not change")
        if isinstance(self.stack[-1], Namespace):
            self.stack[-1].update(state)

    def _binpersid(self, _: Any) -> None:
        what, kind, key, *_rest = self.stack.pop()
        stored = STORAGES.get(str(kind).removeprefix("torch."))
        if what != "storage" or stored is None or not str(key).isalnum():
            raise RefusedError(f"it has numbers of the kind {str(kind)[:80]}")
        self.stack.append(Storage(stored, str(key)))


def plain(value: Any, depth: int = 0, left: list[int] | None = None) -> Any:
    """The same as JSON can write it; a tensor among settings says nothing."""
    left = [NODES] if left is None else left
    left[0] -= 1
    if depth > DEPTH or left[0] < 0:
        raise RefusedError("its settings are nested deeper, or are more, than any model needs")
    if isinstance(value, dict):
        return {str(key)[:1000]: plain(one, depth + 1, left) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one, depth + 1, left) for one in value]
    return None if isinstance(value, (Tensor, Storage)) else value
