"""Bugs for real code: one small, syntactically valid change to a Python function each. Pure and seeded.

These are our own mutation operators over the standard library's `ast`. They follow the kinds of SWE-smith's procedural
generators (operators, conditions, control flow, removals), whose package is not used: it needs a dozen parsers of
other languages. Every change is a replacement of a span of the source, so that formatting and comments stay.
"""

import ast
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SWAPS: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace the characters from `start` to `end` of the source by `text`."""

    kind: str
    """`operator`, `condition`, `constant`, `return`, `arguments` or `removal`."""
    function: str
    """Qualified name of the function that it changes."""
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def mutations(source: str) -> list[Mutation]:
    """All mutations of a module that still parse and change its syntax tree, in the order of the source.

    SyntaxError where the source is no Python. Code outside functions is left alone: breaking an import breaks every
    test and teaches nothing.
    """
    tree = ast.parse(source)
    starts = _line_starts(source)
    plain = ast.dump(tree)
    found = []
    for name, function in _functions(tree):
        for mutation in _of_function(name, function, source, starts):
            try:
                changed = ast.dump(ast.parse(mutation.apply(source)))
            except (SyntaxError, ValueError):
                continue
            if changed != plain:
                found.append(mutation)
    return sorted(set(found), key=lambda each: (each.start, each.end, each.text))


def choose(found: Sequence[Mutation], count: int, seed: str) -> list[Mutation]:
    """At most `count`, spread over functions and kinds: each round takes one mutation of every function, and within a
    function kinds take turns."""
    draw = random.Random(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    by_function: dict[str, list[Mutation]] = {}
    for mutation in found:
        by_function.setdefault(mutation.function, []).append(mutation)
    queues = [_kinds_take_turns(group, draw) for group in by_function.values()]
    draw.shuffle(queues)
    chosen: list[Mutation] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0))
    return chosen


def _kinds_take_turns(group: list[Mutation], draw: random.Random) -> list[Mutation]:
    by_kind: dict[str, list[Mutation]] = {}
    for mutation in draw.sample(group, len(group)):
        by_kind.setdefault(mutation.kind, []).append(mutation)
    ordered: list[Mutation] = []
    while any(by_kind.values()):
        for waiting in by_kind.values():
            if waiting:
                ordered.append(waiting.pop(0))
    return ordered


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Outermost functions and methods by qualified name; what is nested in one belongs to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node, prefix)


def _of_function(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, source: str, starts: list[int]
                 ) -> Iterator[Mutation]:
    def span(node: ast.AST) -> tuple[int, int]:
        return (_offset(source, starts, node.lineno, node.col_offset),
                _offset(source, starts, node.end_lineno, node.end_col_offset))

    def between(left: ast.AST, right: ast.AST, operator: ast.AST, line: int) -> Iterator[Mutation]:
        """Swap the operator's text between two operands, where it stands there once."""
        old, new = SWAPS.get(type(operator), ("", ""))
        start, end = span(left)[1], span(right)[0]
        gap = source[start:end]
        if old and gap.strip(" ()\\\n\t") == old:
            at = start + gap.index(old)
            yield Mutation("operator", name, line, at, at + len(old), new)

    def replaced(kind: str, node: ast.AST, text: str) -> Mutation:
        return Mutation(kind, name, node.lineno, *span(node), text)

    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    for node in (inner for statement in body for inner in ast.walk(statement)):
        match node:
            case ast.BinOp(left=left, op=operator, right=right):
                yield from between(left, right, operator, node.lineno)
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between(left, right, operator, node.lineno)
            case ast.BoolOp(op=operator, values=[left, right]):
                yield from between(left, right, operator, node.lineno)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                start, end = span(test)
                yield replaced("condition", test, f"not ({source[start:end]})")
            case ast.Constant(value=bool() as value):
                yield replaced("constant", node, str(not value))
            case ast.Constant(value=int() as value):
                yield replaced("constant", node, str(value + 1))
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield replaced("return", value, "None")
            case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred | ast.Constant):
                (start, middle), (after, end) = span(first), span(second)
                swapped = source[after:end] + source[middle:after] + source[start:middle]
                yield Mutation("arguments", name, node.lineno, start, end, swapped)
            case ast.Assign() | ast.AugAssign() | ast.Raise():
                yield replaced("removal", node, "pass")


def _line_starts(source: str) -> list[int]:
    """Where each line starts, as `ast` counts lines: `\\n`, `\\r` and `\\r\\n` end one, a form feed does not."""
    starts, at = [0], 0
    while at < len(source):
        if source[at] == "\n" or (source[at] == "\r" and source[at + 1 : at + 2] != "\n"):
            starts.append(at + 1)
        at += 1
    return starts


def _offset(source: str, starts: list[int], line: int, column: int) -> int:
    """Character offset of a position whose column counts UTF-8 bytes, as `ast` gives it."""
    start = starts[line - 1]
    end = starts[line] if line < len(starts) else len(source)
    return start + len(source[start:end].encode()[:column].decode())
