"""Safe pickle reader: interprets the opcodes of a PyTorch checkpoint without importing or calling anything.

A checkpoint needs few opcodes and fewer names. The known names are replaced by harmless stand-ins; any other opcode or
name is an error.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_DEPTH, MAX_NODES = 50, 5_000_000  # of the settings
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
    """The file is damaged, or holds more than weights and settings."""


class Ordered(dict[Any, Any]):
    """Stand-in for collections.OrderedDict."""


class Namespace(dict[Any, Any]):
    """Stand-in for argparse.Namespace and other objects of which only the attributes matter."""


@dataclass(frozen=True)
class StorageRef:
    """A flat array: a member of the zip, or a part of the file."""

    dtype: str
    key: str


@dataclass(frozen=True)
class TensorView:
    """A strided view of a storage."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def checked_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise RefusedError(f"{value!r} is not a valid size")
    return value


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TensorView:
    if not isinstance(storage, StorageRef) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise RefusedError("a tensor is built from something other than a storage")
    if len(shape) != len(strides) or len(shape) > 8:
        raise RefusedError("the shape and strides of a tensor differ in length")
    return TensorView(storage, checked_size(offset), tuple(map(checked_size, shape)), tuple(map(checked_size, strides)))


def _ordered(pairs: Any = ()) -> Ordered:
    return Ordered((key, value) for key, value in pairs)


def _empty(kind: Any, *_: Any) -> Namespace:
    if kind not in OBJECTS:
        raise RefusedError(f"it creates {str(kind)[:80]}, which does not belong in a checkpoint")
    return Namespace()


def _items(items: Any = ()) -> list[Any]:
    """A set as a list; the order of a set has no meaning."""
    return list(items)


def _counts(*given: Any) -> Ordered:
    """A dictionary whose first argument, where it is one, is the content and not a default."""
    return Ordered(given[0]) if given and isinstance(given[0], dict) else Ordered()


# Objects that are read as their attributes: options, and the vocabularies of OpenNMT-py 1 and 2 (torchtext).
OBJECTS = {
    "argparse.Namespace",
    "onmt.inputters.text_dataset.TextMultiField",
    *(
        f"torchtext.{package}{name}"
        for package in ("", "legacy.")
        for name in ("data.field.RawField", "data.field.Field", "vocab.Vocab")
    ),
}
# Functions that such objects refer to; only their names are read.
FUNCTIONS = {
    "onmt.inputters.text_dataset._feature_tokenize",
    *(f"onmt.inputters.inputter.{name}" for name in ("make_src", "make_tgt")),
    *(
        f"torchtext.{package}{name}"
        for package in ("", "legacy.")
        for name in ("vocab._default_unk_index", "data.utils._split_tokenizer")
    ),
}
# Everything that a checkpoint may call, with the function that is run instead.
CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch.Size": tuple,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _counts,
    "collections.Counter": _counts,
    "functools.partial": lambda *_: Namespace(),
    **{f"{module}.{name}": _items for module in ("builtins", "__builtin__") for name in ("set", "frozenset")},
    "copyreg._reconstructor": _empty,
    "copy_reg._reconstructor": _empty,
}
NAMES = {
    *CALLS,
    *OBJECTS,
    *FUNCTIONS,
    "builtins.object",
    "__builtin__.object",
    *(f"torch.{name}" for name in (*STORAGES, *DTYPES)),
}


LITERALS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"),
)
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class PickleReader:
    """Stack machine of a pickle: one method per opcode that does more than push a literal."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes | BinaryIO) -> Any:
        """The object of one pickle; a file is then at the end of that pickle."""
        for code, argument, _ in pickletools.genops(content):
            name = code.name
            if name in LITERALS:
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name])
            elif name == "STOP":
                return self.stack.pop()
            elif (method := getattr(self, f"_{name.lower()}", None)) is not None:
                method(argument)
            elif name not in ("PROTO", "FRAME"):
                raise RefusedError(f"the pickle has an opcode that no checkpoint needs: {name}")
        raise RefusedError("the pickle has no end")

    def _pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
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

    _empty_set = _empty_list

    def _empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def _tuple(self, _: Any) -> None:
        items = tuple(self._pop_to_mark())
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
        items = self._pop_to_mark()
        list.extend(self.stack[-1], items)

    _additems = _appends

    def _frozenset(self, _: Any) -> None:
        items = self._pop_to_mark()
        self.stack.append(items)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        dict.__setitem__(self.stack[-1], key, value)

    def _setitems(self, _: Any) -> None:
        items = self._pop_to_mark()
        dict.update(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def _name(self, name: str) -> None:
        if name not in NAMES:
            raise RefusedError(f"it refers to {name}, which is neither weights nor settings; it was not imported")
        self.stack.append(name)

    def _global(self, both: Any) -> None:
        self._name(".".join(str(both).split(" ", 1)))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(f"{module}.{name}")

    def _reduce(self, _: Any) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or name not in CALLS or not isinstance(arguments, tuple):
            raise RefusedError(f"it calls {str(name)[:80]}, which does not belong in a checkpoint; it was not called")
        self.stack.append(CALLS[name](*arguments))

    def _newobj(self, _: Any) -> None:
        self.stack.pop()
        self.stack.append(_empty(self.stack.pop()))

    def _build(self, _: Any) -> None:
        """Fills a namespace; other attributes of an ordered dictionary, and arguments of a function, are ignored."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Namespace) and isinstance(state, tuple):
            return
        if not isinstance(self.stack[-1], (Namespace, Ordered)) or not isinstance(state, dict):
            raise RefusedError("it sets the state of an object other than a namespace")
        if isinstance(self.stack[-1], Namespace):
            self.stack[-1].update(state)

    def _binpersid(self, _: Any) -> None:
        what, kind, key, *rest = self.stack.pop()
        stored = STORAGES.get(str(kind).removeprefix("torch."))
        if what != "storage" or stored is None or not str(key).isalnum():
            raise RefusedError(f"it has a storage of the type {str(kind)[:80]}")
        if len(rest) > 2 and rest[2] is not None:
            raise RefusedError(f"the storage {str(key)[:80]} is a part of another")
        self.stack.append(StorageRef(stored, str(key)))


def to_json(value: Any, depth: int = 0, left: list[int] | None = None) -> Any:
    """The value in a form that JSON can represent; tensors become null."""
    left = [MAX_NODES] if left is None else left
    left[0] -= 1
    if depth > MAX_DEPTH or left[0] < 0:
        raise RefusedError("the settings are larger, or nested more deeply, than any model needs")
    if isinstance(value, dict):
        return {str(key)[:1000]: to_json(one, depth + 1, left) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(one, depth + 1, left) for one in value]
    return None if isinstance(value, (TensorView, StorageRef)) else value
