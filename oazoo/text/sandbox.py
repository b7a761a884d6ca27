"""A jinja2 environment for templates from strangers: no way out, and an end to every loop and every string.

jinja2's sandbox keeps a template away from Python's insides, but lets it loop 100000 ** n times and build
strings of any length. This one also counts. Before a template is compiled its syntax tree is rewritten so
that each loop step, macro call, concatenation and container goes through :class:`Budget`; arithmetic, calls
and filters that can grow a value are checked before they run. A template that wants too much ends in
:class:`TemplateLimitError`.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

#: Loop steps, calls and list items of one rendering. A long conversation takes some thousands.
MAX_STEPS = 1_000_000
#: Characters that one rendering may write, and that one string may have.
MAX_CHARS = 1 << 21
#: A rendering that takes longer is stopped at its next step.
MAX_SECONDS = 5.0
#: Widths, indents and the like.
MAX_WIDTH = 10_000
MAX_INTEGER = 1 << 63
_CHARS_PER_STEP = 64
#: Values that one value may hold, at all depths.
MAX_WEIGHT = 1_000_000
_CONTAINERS = (list, tuple, dict, set, frozenset)

_FILTERS = """
    abs attr batch capitalize center count d default dictsort e escape first float format groupby indent int
    items join last length list lower map max min reject rejectattr replace reverse round safe select
    selectattr slice sort string sum title tojson trim truncate unique upper urlencode wordcount
""".split()  # noqa: SIM905  # one name a line would take a page
#: Filters whose integer arguments set the size of the result.
_SIZED_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "truncate"})
#: str methods that a template may not use: their result's length is an argument, and others do the same.
_REFUSED_METHODS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode", "format_map"}
)
_FORMAT_WIDTH = re.compile(r"[0-9]{5,}|\*|\{[^{}]*\{")
_TIME_WIDTH = re.compile(r"%[^A-Za-z%]*[0-9]{2,}")


class TemplateLimitError(SecurityError):
    """A template went past a limit of the sandbox."""


class Budget:
    """What is left of one rendering's allowance."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.chars = MAX_CHARS
        self.deadline = time.monotonic() + MAX_SECONDS
        self._weights: dict[int, tuple[Any, int]] = {}

    def step(self, count: int = 1) -> None:
        """Use up steps, and look at the clock."""
        self.steps -= count
        if self.steps < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:.0f} seconds")

    def write(self, chars: int) -> None:
        """Use up output."""
        self.chars -= chars
        if self.chars < 0:
            raise TemplateLimitError(f"it writes more than {MAX_CHARS} characters")

    def weigh(self, value: Any) -> Any:
        """Pay for a new value by its size; a container must not hold too much, counting what it holds twice twice."""
        if isinstance(value, str):
            check_length(len(value))
            self.step(1 + len(value) // _CHARS_PER_STEP)
        elif isinstance(value, int):
            check_integer(value)
        elif isinstance(value, _CONTAINERS):
            self.step(1 + len(value) // 2)
            if self._weight(value) > MAX_WEIGHT:
                raise TemplateLimitError(f"it builds lists that hold more than {MAX_WEIGHT} items in all")
        return value

    def _weight(self, value: Any) -> int:
        """Number of values in a container at all depths. Templates cannot change one, so a weight found stays true."""
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        weight = 1
        for item in items:
            if isinstance(item, str):
                weight += 1 + len(item) // _CHARS_PER_STEP
            else:
                weight += self._weight(item) if isinstance(item, _CONTAINERS) else 1
        self._weights[id(value)] = (value, weight)  # holding the value keeps its id its own
        return weight


def check_length(chars: int) -> None:
    """Refuse a string of that many characters."""
    if chars > MAX_CHARS:
        raise TemplateLimitError(f"it builds a string of {chars} characters; at most {MAX_CHARS} are allowed")


def check_integer(value: int) -> None:
    """Refuse an integer outside 64 bits."""
    if not -MAX_INTEGER <= value < MAX_INTEGER:
        raise TemplateLimitError("it computes with integers beyond 64 bits")


def _check_format(text: Any, values: Sequence[Any], marker: str) -> None:
    """Refuse a format that could make much of little: huge widths, or a long value put in many times."""
    if not isinstance(text, str):
        return
    if _FORMAT_WIDTH.search(text):
        raise TemplateLimitError("it uses a format with a very large or computed width")
    longest = max((len(str(v)) for v in values), default=0)
    check_length(len(text) + text.count(marker) * longest)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one chat template. Not for use by two threads at once.

    Whitespace control and the functions that templates expect (``raise_exception``, ``strftime_now``,
    ``tojson`` that keeps non-ASCII text, ``break``/``continue``, ``{% generation %}``) are those of the
    Hugging Face convention.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, raise_exception: Callable[[str], None]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are computed at run time, within the budget
            finalize=_pay_for_output,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            autoescape=False,
            cache_size=0,
        )
        self.budget = Budget()
        known = self.filters
        self.filters = {name: _bounded_filter(self, name, known[name]) for name in _FILTERS if name in known}
        self.filters["tojson"] = _bounded_filter(self, "tojson", _tojson)
        names = ("range", "dict", "namespace")
        self.globals = {name: self.globals[name] for name in names}
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = _strftime_now

    def load(self, source: str) -> jinja2.Template:
        """Compile a template from its source."""
        tree = _Rewriter(self).visit(self.parse(source))
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None), None)

    # Called from compiled templates (see _Rewriter).

    def tick(self, chars: int) -> None:
        self.budget.step()
        self.budget.write(chars)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.step()
            yield item

    def concat_values(self, *values: Any) -> str:
        parts = [str(v) for v in values]
        check_length(sum(map(len, parts)))
        text = "".join(parts)
        self.budget.weigh(text)
        return text

    def weighed(self, value: Any) -> Any:
        return self.budget.weigh(value)

    # What the sandbox calls for each operator and call.

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.step()
        if operator == "**":
            raise TemplateLimitError("it uses powers, which templates may not")
        if operator == "%":
            _check_format(left, right if isinstance(right, tuple) else (right,), "%")
        if operator == "*":
            _check_product(left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            check_length(len(left) + len(right))
        return self.budget.weigh(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name == "join" and args:
                args = (list(__self.counted(args[0])), *args[1:])
            _check_method(owner, name, args)
        if owner is __self:  # one of ours, which pays by itself and has no use for jinja2's own arguments
            return __obj(*args)
        return __self.budget.weigh(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """What a template gets for ``text.format``: the sandbox's safe version, once the sizes are checked."""
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None

        @functools.wraps(wrapper)
        def checked(*args: Any, **kwargs: Any) -> str:
            mapping = list(args[0].values()) if args and isinstance(args[0], dict) else []
            _check_format(value.__self__, [*args, *kwargs.values(), *mapping], "{")
            return wrapper(*args, **kwargs)

        return checked


def _check_product(left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            check_length(len(value) * max(count, 0))


def _check_method(text: str, name: str, args: Sequence[Any]) -> None:
    if name in _REFUSED_METHODS:
        raise TemplateLimitError(f"it calls the string method {name}, which templates may not")
    if name == "replace":
        _check_replace(text, args)
    elif name == "join" and args:
        _check_join(text, args[0])


def _check_replace(text: Any, args: Sequence[Any]) -> None:
    if len(args) >= 2 and isinstance(text, str) and isinstance(args[0], str) and isinstance(args[1], str):
        check_length(len(text) + text.count(args[0]) * len(args[1]))


def _check_json_layout(arguments: Sequence[Any]) -> None:
    for argument in arguments:
        width = argument if isinstance(argument, int) else len(str(argument))
        if width > 32:
            raise TemplateLimitError("it uses tojson with an indent or separators longer than 32 characters")


def _check_join(separator: Any, items: Any) -> None:
    if isinstance(items, (list, tuple)):
        total = sum(len(i) for i in items if isinstance(i, str))
        check_length(total + len(str(separator)) * len(items))


def _bounded_filter(
    environment: BoundedEnvironment, name: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A filter whose arguments are checked before it runs, and whose result is paid for."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # an environment or context comes first

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        environment.budget.step()
        value, *rest = args[skip:] or (None,)
        if isinstance(value, (list, tuple, dict, str)):
            environment.budget.step(len(value) // _CHARS_PER_STEP)
        for argument in (*rest, *kwargs.values()):
            if name in _SIZED_FILTERS and isinstance(argument, int) and abs(argument) > MAX_WIDTH:
                raise TemplateLimitError(f"it uses the filter {name} with a width of {argument}")
        if name == "format":
            _check_format(value, [*rest, *kwargs.values()], "%")
        elif name == "replace":
            _check_replace(value, [*rest, *(kwargs[k] for k in ("old", "new") if k in kwargs)])
        elif name == "tojson":
            _check_json_layout([*rest, *kwargs.values()])
        elif name == "join":
            value = list(environment.counted(value)) if value is not None else []
            _check_join(rest[0] if rest else kwargs.get("d", ""), value)
            args = (*args[:skip], value, *rest)
        elif name == "indent" and isinstance(value, str):
            check_length(len(value) + (value.count("\n") + 1) * _indent_width(rest, kwargs))
        return environment.budget.weigh(function(*args, **kwargs))

    return bounded


def _indent_width(rest: Sequence[Any], kwargs: dict[str, Any]) -> int:
    width = rest[0] if rest else kwargs.get("width", 4)
    return len(width) if isinstance(width, str) else int(width)


@jinja2.pass_context
def _pay_for_output(context: jinja2.runtime.Context, value: Any) -> str:
    """Count what ``{{ … }}`` writes. Taking the context keeps jinja2 from calling this while it compiles."""
    text = value if isinstance(value, str) else str(value)
    environment = context.environment
    assert isinstance(environment, BoundedEnvironment)
    environment.tick(len(text))
    return text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    if len(form) > 200 or _TIME_WIDTH.search(form):
        raise TemplateLimitError("it asks for the time in a format that is very long or very wide")
    return datetime.datetime.now().strftime(form)


class _GenerationTag(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's words for training; here it is only
    its body.
    """

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Rewriter(NodeTransformer):
    """Puts the budget into a template's syntax tree."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def _ours(self, name: str, *args: nodes.Expr, like: nodes.Node) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name, lineno=like.lineno)
        call = nodes.Call(function, list(args), [], None, None, lineno=like.lineno)
        return call.set_environment(self._environment)  # type: ignore[return-value]

    def _with_tick(self, body: list[nodes.Node], like: nodes.Node) -> list[nodes.Node]:
        """The body with a statement in front that pays for one step and for the fixed text in it."""
        chars = sum(
            len(data.data)
            for part in body
            for data in (
                [part] if isinstance(part, nodes.TemplateData) else part.find_all(nodes.TemplateData)
            )
        )
        tick = nodes.ExprStmt(
            self._ours("tick", nodes.Const(chars, lineno=like.lineno), like=like), lineno=like.lineno
        )
        return [tick.set_environment(self._environment), *body]

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        iterated = node.iter
        assert isinstance(iterated, nodes.Expr)  # jinja2 declares it as any node
        node.iter = self._ours("counted", iterated, like=node)
        node.body = self._with_tick(node.body, node)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body = self._with_tick(node.body, node)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body = self._with_tick(node.body, node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._ours("concat_values", *node.nodes, like=node)

    def _visit_container(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return self._ours("weighed", node, like=node)

    visit_List = _visit_container
    visit_Dict = _visit_container

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._ours("weighed", node, like=node) if node.ctx == "load" else node
