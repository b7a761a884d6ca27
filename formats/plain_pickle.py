"""A pickle interpreter that can only make plain data and describe tensors; nothing is imported and nothing is called.

It knows the opcodes that plain data takes, and three kinds of globals, by name: ``torch._utils._rebuild_tensor_v2``,
``collections.OrderedDict`` and ``torch.…Storage``. A global is a name here, never an object of Python's. Whatever else a
pickle asks for is refused before anything follows from it. Opcodes: CPython's ``pickletools``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from oazoo.errors import FormatError
from oazoo.formats.messages import quoted

MAX_BYTES = 64 << 20
MAX_OBJECTS = 1 << 20
MAX_MARKS = 1 << 12
MAX_TEXT = 1 << 20

#: Storage types of torch, and our encodings.
STORAGES = {
    "DoubleStorage": "f64",
    "FloatStorage": "f32",
    "HalfStorage": "f16",
    "BFloat16Storage": "bf16",
    "LongStorage": "i64",
    "IntStorage": "i32",
    "ShortStorage": "i16",
    "CharStorage": "i8",
    "ByteStorage": "u8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "c64",
    "ComplexDoubleStorage": "c128",
}
_REBUILD, _ORDERED = "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"
ALLOWED = (_REBUILD, _ORDERED, *(f"torch.{name}" for name in STORAGES))


@dataclass(frozen=True, slots=True)
class Name:
    """A global, by name only."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage record of the archive: its key, encoding and number of elements."""

    key: str
    encoding: str
    count: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor: elements ``offset + Σ index·stride`` of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_PLAIN = (str, int, float, bool, type(None))


def loads(data: bytes) -> Any:
    """The value of a pickle: dicts, lists, tuples, texts, numbers, None, and :class:`TensorView`.

    Raises:
        FormatError: the pickle asks for anything else (the message has its name), is damaged, or over a limit.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"a pickle of {len(data)} bytes; at most {MAX_BYTES} are read")
    return _Machine(data).run()


class _Machine:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._objects = 0

    def run(self) -> Any:
        while True:
            at = self._at
            opcode = self._take(1)
            if opcode == b".":
                break
            handler = _OPCODES.get(opcode[0])
            if handler is None:
                raise FormatError(
                    f"the pickle has opcode {opcode!r} at byte {at}, which plain data does not take; it is not run"
                )
            self._objects += 1
            if self._objects > 8 * MAX_OBJECTS or len(self._stack) > MAX_OBJECTS:
                raise FormatError(f"the pickle makes more than {MAX_OBJECTS} objects")
            handler(self)
        if self._marks or len(self._stack) != 1:
            raise FormatError(f"the pickle ends with {len(self._stack)} values on its stack, not one")
        if self._at != len(self._data):
            raise FormatError(f"{len(self._data) - self._at} bytes follow the end of the pickle")
        return self._stack[0]

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise FormatError(f"the pickle is cut short: {size} bytes at byte {self._at} are not there")
        self._at += size
        return piece

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 256)
        if end < 0:
            raise FormatError(f"the pickle has a name without end at byte {self._at}")
        line = self._data[self._at : end]
        self._at = end + 1
        return line.decode("utf-8", "replace")

    def _text(self, size: int) -> None:
        if size > MAX_TEXT:
            raise FormatError(f"the pickle has a text of {size} bytes; at most {MAX_TEXT} are read")
        try:
            self._stack.append(self._take(size).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise FormatError(f"the pickle has a text that is not UTF-8 before byte {self._at}") from error

    # -- stack ---------------------------------------------------------------------------------------------------------

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise FormatError(f"the pickle takes a value from an empty stack before byte {self._at}")
        return self._stack.pop()

    def _top(self, kind: type) -> Any:
        value = self._pop()
        if type(value) is not kind:
            raise FormatError(
                f"the pickle treats {_shown(value)} as a {kind.__name__} before byte {self._at}"
            )
        self._stack.append(value)
        return value

    def _items(self) -> list[Any]:
        """Everything since the last mark, which goes, too."""
        if not self._marks:
            raise FormatError(f"the pickle has no mark before byte {self._at}")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _mark(self) -> None:
        self._marks.append(len(self._stack))
        if len(self._marks) > MAX_MARKS:
            raise FormatError(f"the pickle is nested deeper than {MAX_MARKS}")

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _set_items(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2:
            raise FormatError(f"the pickle has a key without a value before byte {self._at}")
        for key, value in zip(items[::2], items[1::2]):
            if type(key) not in (str, int):
                raise FormatError(f"the pickle has {_shown(key)} as a key, not a text or a whole number")
            if key in target:
                raise FormatError(f"the pickle has the key {quoted(key)} twice")
            target[key] = value

    def _put(self, index: int) -> None:
        if index > 4 * MAX_OBJECTS:
            raise FormatError(f"the pickle remembers a value under the number {index}")
        value = self._pop()
        self._stack.append(value)
        self._memo[index] = value

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise FormatError(f"the pickle refers to a value {index} that it does not have")
        self._stack.append(self._memo[index])

    # -- names, storages, tensors --------------------------------------------------------------------------------------

    def _global(self, module: str, attribute: str) -> None:
        name = f"{module}.{attribute}"
        if name not in ALLOWED:
            raise FormatError(
                f"the pickle asks for {quoted(name)}, which is no tensor, dict, list, text or number; it is not run"
            )
        self._stack.append(Name(name))

    def _stack_global(self) -> None:
        attribute, module = self._pop(), self._pop()
        if type(attribute) is not str or type(module) is not str:
            raise FormatError("the pickle has a global whose name is no text")
        self._global(module, attribute)

    def _persistent(self) -> None:
        value = self._pop()
        if type(value) is not tuple or len(value) != 5 or value[0] != "storage":
            raise FormatError(f"the pickle refers to {_shown(value)}, which is no storage")
        _, kind, key, _, count = value
        named = kind.name.removeprefix("torch.") if type(kind) is Name else ""
        if named not in STORAGES or type(key) is not str or not key.isdecimal() or type(count) is not int:
            raise FormatError(
                f"the pickle has a storage of type {_shown(kind)}, key {_shown(key)}, size {_shown(count)}"
            )
        if not 0 <= count < 1 << 60:
            raise FormatError(f"the pickle has a storage of {quoted(count)} elements")
        self._stack.append(Storage(key, STORAGES[named], count))

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if type(function) is not Name or type(arguments) is not tuple:
            raise FormatError(f"the pickle calls {_shown(function)}, which is not run")
        if function.name == _ORDERED:
            if arguments:
                raise FormatError("the pickle makes an OrderedDict in a way that is not known")
            self._stack.append({})
        elif function.name == _REBUILD:
            self._stack.append(_tensor(arguments))
        else:
            raise FormatError(f"the pickle calls {function.name}, which is not run")

    def _build(self) -> None:
        # A state_dict carries attributes (its _metadata: versions of modules); they hold no weights.
        state = self._pop()
        self._top(dict)
        if type(state) is not dict:
            raise FormatError(f"the pickle sets the state of a dict to {_shown(state)}")

    def _long(self) -> None:
        size = self._number("<B")
        if size > 8:
            raise FormatError(f"the pickle has a number of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _protocol(self) -> None:
        version = self._number("<B")
        if not 2 <= version <= 5:
            raise FormatError(f"the pickle has protocol {version}; 2 to 5 are read")

    def _append(self, items: list[Any]) -> None:
        self._top(list).extend(items)


def _tensor(arguments: tuple[Any, ...]) -> TensorView:
    """The tensor of ``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])``."""
    if len(arguments) not in (6, 7):
        raise FormatError(f"the pickle makes a tensor of {len(arguments)} arguments")
    storage, offset, shape, strides, grad, hooks = arguments[:6]
    sizes = (offset, *shape, *strides) if type(shape) is tuple and type(strides) is tuple else (None,)
    if (
        type(storage) is not Storage
        or any(type(size) is not int or not 0 <= size < 1 << 60 for size in sizes)
        or len(shape) != len(strides)
        or len(shape) > 64
        or type(grad) is not bool
        or hooks not in ({}, None)
        or (len(arguments) == 7 and arguments[6] not in ({}, None))
    ):
        raise FormatError(
            f"the pickle makes a tensor of {_shown(storage)}, offset {_shown(offset)}, sizes {_shown(shape)}, "
            f"strides {_shown(strides)}, which is not a dense tensor"
        )
    return TensorView(storage, offset, shape, strides)


def _shown(value: Any) -> str:
    if type(value) is Name:
        return value.name
    if type(value) in _PLAIN:
        return quoted(value)
    if type(value) is tuple and len(value) < 9 and all(type(item) in _PLAIN for item in value):
        return quoted(value)
    return f"a {type(value).__name__}"


_OPCODES: dict[int, Any] = {
    ord(code): action
    for code, action in {
        "\x80": _Machine._protocol,
        "\x95": lambda m: m._number("<Q"),  # a frame: only a hint for buffering
        "}": lambda m: m._stack.append({}),
        "]": lambda m: m._stack.append([]),
        ")": lambda m: m._stack.append(()),
        "(": _Machine._mark,
        "t": lambda m: m._stack.append(tuple(m._items())),
        "\x85": lambda m: m._tuple(1),
        "\x86": lambda m: m._tuple(2),
        "\x87": lambda m: m._tuple(3),
        "N": lambda m: m._stack.append(None),
        "\x88": lambda m: m._stack.append(True),
        "\x89": lambda m: m._stack.append(False),
        "J": lambda m: m._stack.append(m._number("<i")),
        "K": lambda m: m._stack.append(m._number("<B")),
        "M": lambda m: m._stack.append(m._number("<H")),
        "\x8a": _Machine._long,
        "G": lambda m: m._stack.append(m._number(">d")),
        "X": lambda m: m._text(m._number("<I")),
        "\x8c": lambda m: m._text(m._number("<B")),
        "\x8d": lambda m: m._text(m._number("<Q")),
        "q": lambda m: m._put(m._number("<B")),
        "r": lambda m: m._put(m._number("<I")),
        "\x94": lambda m: m._put(len(m._memo)),
        "h": lambda m: m._get(m._number("<B")),
        "j": lambda m: m._get(m._number("<I")),
        "c": lambda m: m._global(m._line(), m._line()),
        "\x93": _Machine._stack_global,
        "Q": _Machine._persistent,
        "R": _Machine._reduce,
        "b": _Machine._build,
        "s": lambda m: m._set_items(list(reversed([m._pop(), m._pop()]))),
        "u": lambda m: m._set_items(m._items()),
        "a": lambda m: m._append([m._pop()]),
        "e": lambda m: m._append(m._items()),
    }.items()
}
