"""Evaluates miles' model files, `scripts/models/NAME.py`, without executing them.

Their function `model_args` returns Megatron-LM's flags for a model. Training scripts of miles call
`python3 model_args_utils.py NAME`, which prints them. Only the expressions of such files are
supported: constants, f-strings, arithmetic, lists, conditions and calls of their own functions.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

PROGRAM = "model_args_utils.py"

_MAX_SIZE = 10_000  # of the factors of a product, which may be lists
_OPERATIONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_METHODS: Mapping[str, Callable[..., Any]] = {
    "join": str.join,
    "split": str.split,
    "strip": str.strip,
}


def flags_of_model(program: Path, name: str) -> str:
    """Return the output of `model_args_utils.py NAME`, "" if it cannot be evaluated.

    Args:
        program: `model_args_utils.py` in a checkout of miles.
        name: the name of a model file, without its ending.
    """
    folder = program.resolve().parents[3] / "scripts" / "models"
    with suppress(OSError, SyntaxError, ValueError, TypeError, KeyError, RecursionError):
        return " ".join(str(_load(program, folder, name)["model_args"]()).split())
    return ""


def _load(program: Path, folder: Path, name: str) -> dict[str, Any]:
    """Return the constants and functions of the program and of a model file."""

    def sibling(file: str, name: str, **values: Any) -> Any:
        return _load(program, folder, name)["model_args"](**values)

    names: dict[str, Any] = {
        **{function.__name__: function for function in (int, str, min, max, len)},
        "__file__": name,
        "os.environ.get": os.environ.get,
    }
    for file in (program, folder / f"{Path(name).name}.py"):
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.FunctionDef):
                names[statement.name] = partial(_call, statement, names)
            with suppress(ValueError, TypeError, KeyError):
                _assign(statement, names)
        names["load_sibling_model_args"] = sibling
    return names


def _assign(statement: ast.stmt, names: dict[str, Any]) -> None:
    match statement:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
        ):
            names[name] = _evaluate(value, names)


def _call(
    function: ast.FunctionDef, names: Mapping[str, Any], *values: Any, **keywords: Any
) -> Any:
    """Call a function of a file that consists of assignments and a `return`."""
    parameters = function.args
    scope = dict(names)
    required = len(parameters.args) - len(parameters.defaults)
    optional = zip(parameters.args[required:], parameters.defaults, strict=True)
    for parameter, default in (*optional, *zip(parameters.kwonlyargs, parameters.kw_defaults)):  # noqa: B905
        scope[parameter.arg] = default and _evaluate(default, names)
    scope |= dict(zip((parameter.arg for parameter in parameters.args), values))  # noqa: B905
    scope |= keywords
    for statement in function.body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            return _evaluate(statement.value, scope)
        _assign(statement, scope)
    raise ValueError(f"{function.name} returns no value")


def _evaluate(term: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression.

    Raises:
        ValueError: It has something else than the supported parts.
    """
    value_of = partial(_evaluate, names=names)
    match term:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.JoinedStr(values=parts):
            return "".join(map(str, map(value_of, parts)))
        case ast.FormattedValue(value=part):
            return value_of(part)
        case ast.List(elts=parts):
            return list(map(value_of, parts))
        case ast.BoolOp(op=ast.Or(), values=[lhs, rhs]):
            return value_of(lhs) or value_of(rhs)
        case ast.IfExp(test=test, body=body, orelse=alternative):
            return value_of(body if value_of(test) else alternative)
        case ast.BinOp(lhs, kind, rhs) | ast.Compare(lhs, [kind], [rhs]):
            return _combine(kind, value_of(lhs), value_of(rhs))
        case ast.Call(func=function, args=args, keywords=keywords):
            options = {word.arg: value_of(word.value) for word in keywords if word.arg}
            return _function(function, names)(*map(value_of, args), **options)
    raise ValueError(ast.unparse(term))


def _function(function: ast.expr, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a method of a text, or a function by its name."""
    match function:
        case ast.Attribute(value=text, attr=name) if name in _METHODS:
            return partial(_METHODS[name], _evaluate(text, names))
    call: Callable[..., Any] = names[ast.unparse(function)]
    return call


def _combine(kind: ast.AST, lhs: Any, rhs: Any) -> Any:
    if isinstance(kind, ast.Mult) and max(_size(lhs), _size(rhs)) > _MAX_SIZE:
        raise ValueError("a product is too large")
    return _OPERATIONS[type(kind)](lhs, rhs)


def _size(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value)
