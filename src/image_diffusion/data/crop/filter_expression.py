"""Parse a rule over the values of an image, such as `aesthetic > 5 and language in ("en", "de")`: it is not
executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
"""Values of one image, by name: numbers, texts, true or false."""
_Node = Callable[[Values], Any]

_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_KNOWN = "names, numbers, 'texts', < <= > >= == !=, in (one, of, these), and, or, not and parentheses"


class MissingValue(Exception):  # noqa: N818 - the image is left out, which is no failure
    """Raised if an image has no value under a name in the rule."""


@dataclass(frozen=True)
class Rule:
    """Rule over the values of an image. text: as it was written. names: names of the values in it, sorted. matches:
    returns whether the rule holds for an image; raises `MissingValue`, or ValueError if a value cannot be compared."""

    text: str
    names: tuple[str, ...]
    matches: Callable[[Values], bool]


def parse_rule(text: str) -> Rule:
    """Parse a rule, in Python's syntax. Raises ValueError for a text that is not a rule."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
        condition = _condition(tree)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a rule: {error.msg}. It may hold {_KNOWN}.") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{text[:40]!r}… is nested too deeply for a rule.") from None
    if not names:
        raise ValueError(f"{text!r} is empty. Example: aesthetic > 5.")
    return Rule(text, tuple(names), condition)


def _condition(node: ast.expr) -> Callable[[Values], bool]:
    """Parse a condition, which is true or false of an image."""
    match node:
        case ast.BoolOp(op, parts):
            inner, join = [_condition(part) for part in parts], all if isinstance(op, ast.And) else any
            return lambda values: join(operand(values) for operand in inner)
        case ast.UnaryOp(ast.Not(), operand):
            other = _condition(operand)
            return lambda values: not other(values)
        case ast.Compare(left, operators, rest):
            steps = [_step(op, _value(a), b) for op, a, b in zip(operators, [left, *rest], rest, strict=False)]
            return lambda values: all(step(values) for step in steps)
        case ast.Name(name):
            return lambda values: _truth(_look_up(values, name), name)
    raise ValueError(f"{ast.unparse(node)!r} cannot stand in a rule. It may hold {_KNOWN}.")


def _step(op: ast.cmpop, left: _Node, right: ast.expr) -> Callable[[Values], bool]:
    if isinstance(op, ast.In | ast.NotIn):
        if not isinstance(right, ast.Tuple | ast.List):
            raise ValueError(f"{ast.unparse(right)!r} is not a list. Example: language in ('en', 'de').")
        choices, wanted = [_value(element) for element in right.elts], isinstance(op, ast.In)
        return lambda values: any(_compared(operator.eq, left(values), choice(values)) for choice in choices) is wanted
    if type(op) not in _ORDER:
        raise ValueError(f"A rule may hold {_KNOWN}; it has another comparison.")
    compare, value = _ORDER[type(op)], _value(right)
    return lambda values: _compared(compare, left(values), value(values))


def _value(node: ast.expr) -> _Node:
    """Parse a value that can be compared: a name or a constant."""
    match node:
        case ast.Constant(int() | float() | str() as constant):
            return lambda values: constant
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return lambda values: -number
        case ast.Name(name):
            return lambda values: _look_up(values, name)
    raise ValueError(f"{ast.unparse(node)!r} cannot stand in a rule. It may hold {_KNOWN}.")


def _look_up(values: Values, name: str) -> Any:
    value = values.get(name)
    if value is None or value == "":
        raise MissingValue(name)
    return value


def _compared(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    """Compare two values as numbers if both are numbers or texts of numbers, such as CSV cells; otherwise as texts."""
    try:
        numbers = float(left), float(right)
    except (TypeError, ValueError):
        if isinstance(left, str) and isinstance(right, str):
            return compare(left, right)
        raise ValueError(f"{left!r} and {right!r} cannot be compared") from None
    return compare(*numbers)


def _truth(value: Any, name: str) -> bool:
    """Return the truth value of a condition without comparison: true, false, or their spelling in a table."""
    booleans = {"true": True, "false": False, "1": True, "0": False}
    boolean = booleans.get(str(value).lower())
    if boolean is None:
        raise ValueError(f"{name} is {value!r}, not true or false. Compare it: {name} > 0")
    return boolean
