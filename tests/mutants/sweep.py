"""Make every small change of some files, one at a time, and tell which of them no test notices.

    python -m tests.mutants.sweep               all files of ``SWEEPS``, which takes hours
    python -m tests.mutants.sweep agreeing      those with one of these words in their name

Conditions are negated, bounds moved by one, ``and`` and ``or`` exchanged, calls, assignments and
errors left out. Exits with 1 if a change survives that ``EXPLAINED`` does not tell of.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .copies import copy_repository, run_tests
from .explained import EXPLAINED

_T = "tests/checkpoint/"

SWEEPS = {
    "checkpoint/saving/agreeing.py": (
        f"{_T}saving/test_agreeing.py",
        f"{_T}test_together.py",
        f"{_T}files/test_commit.py",
    ),
    "checkpoint/ranks/boards.py": (f"{_T}ranks/test_boards.py", f"{_T}ranks/test_rendezvous.py"),
    "checkpoint/files/committing.py": (
        f"{_T}files/test_committing.py",
        f"{_T}files/test_commit.py",
        f"{_T}test_steps.py",
        f"{_T}files/test_commit_states.py",
    ),
    "checkpoint/ranks/frames.py": (
        f"{_T}ranks/test_frames.py",
        f"{_T}ranks/test_wire_rules.py",
        f"{_T}test_together.py",
    ),
    "checkpoint/ranks/group_ranks.py": (
        f"{_T}ranks/test_group_ranks.py",
        f"{_T}ranks/test_loop.py",
        f"{_T}ranks/test_calls.py",
        f"{_T}ranks/test_wires.py",
    ),
    "checkpoint/ranks/greeting.py": (
        f"{_T}ranks/test_greeting.py",
        f"{_T}ranks/test_rendezvous.py",
        f"{_T}ranks/test_loop.py",
        f"{_T}ranks/test_calls.py",
    ),
    "checkpoint/ranks/link.py": (
        f"{_T}ranks/test_link.py",
        f"{_T}ranks/test_wire_rules.py",
        f"{_T}ranks/test_loop.py",
    ),
    "checkpoint/ranks/loop.py": (
        f"{_T}ranks/test_loop_rounds.py",
        f"{_T}ranks/test_loop.py",
        f"{_T}ranks/test_wire_rules.py",
        f"{_T}ranks/test_rendezvous.py",
    ),
    "checkpoint/ranks/together.py": (
        f"{_T}ranks/test_together.py",
        f"{_T}test_together.py",
        f"{_T}ranks/test_calls.py",
    ),
    "checkpoint/reading/execution.py": (
        f"{_T}reading/test_reading.py",
        f"{_T}files/test_damage.py",
        f"{_T}reading/test_read_once.py",
        f"{_T}loading/test_casting.py",
    ),
    "checkpoint/ranks/rendezvous.py": (
        f"{_T}ranks/test_boards.py",
        f"{_T}ranks/test_rendezvous.py",
        f"{_T}ranks/test_calls.py",
    ),
    "checkpoint/ranks/call.py": (
        f"{_T}ranks/test_wire_rules.py",
        f"{_T}ranks/test_wire_calls.py",
        f"{_T}ranks/test_calls.py",
    ),
    "checkpoint/ranks/wire.py": (
        f"{_T}ranks/test_wire_rules.py",
        f"{_T}ranks/test_wire_calls.py",
        f"{_T}ranks/test_loop.py",
        f"{_T}ranks/test_calls.py",
    ),
}
"""The tests that must notice changes, by file; quick ones first."""

_OTHER_BOUNDS: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a file."""

    node: ast.stmt | ast.expr
    new: str

    def span(self, text: str) -> tuple[int, int]:
        """Return where the changed code stands, in bytes from the start of the text."""
        lines = text.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.node.lineno - 1])) + self.node.col_offset
        last = self.node.end_lineno or self.node.lineno
        return start, sum(map(len, lines[: last - 1])) + (self.node.end_col_offset or 0)

    def old(self, text: str) -> str:
        """Return what is changed."""
        start, end = self.span(text)
        return text.encode()[start:end].decode()

    def applied(self, text: str) -> str:
        """Return the text of the changed file."""
        start, end = self.span(text)
        data = text.encode()
        return (data[:start] + self.new.encode() + data[end:]).decode()


def changes_of(text: str) -> Iterator[Change]:
    """Yield the changes of a file, in the order of its lines."""
    found: list[Change] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            test = ast.unparse(node.test)
            if test not in ("True", "TYPE_CHECKING"):
                found.append(Change(node.test, f"(not ({test}))"))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            other = _OTHER_BOUNDS.get(type(node.ops[0]))
            if other is not None:
                left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
                found.append(Change(node, f"(({left}) {other} ({right}))"))
        if isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            found.append(Change(node, f"({word.join(f'({ast.unparse(v)})' for v in node.values)})"))
        if isinstance(node, ast.stmt) and _may_be_left_out(node):
            found.append(Change(node, "pass"))
    return iter(sorted(found, key=lambda change: (change.node.lineno, change.node.col_offset)))


def _may_be_left_out(node: ast.stmt) -> bool:
    """Whether the file still means something without a statement; types and names must stay."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Raise):
        return node.exc is not None
    if isinstance(node, ast.Return):
        return node.value is None
    return isinstance(node, ast.AugAssign | ast.Break | ast.Continue | ast.Delete)


def sweep(file: str, folder: Path, packages: Path) -> int:
    """Try all changes of a file in a copy of the repository; return how many survived."""
    path, tests = folder / file, SWEEPS[file]
    text = path.read_text()
    began = time.monotonic()
    if (found := run_tests(folder, packages, tests)) != "SURVIVED":
        print(f"{file}: its tests fail as it is: {found}")
        return 1
    limit = 20 + 4 * (time.monotonic() - began)
    tried = survived = 0
    for change in changes_of(text):
        old = change.old(text)
        if (file, old) in EXPLAINED:
            continue
        tried += 1
        try:
            path.write_text(change.applied(text))
            if run_tests(folder, packages, tests, limit) == "SURVIVED":
                survived += 1
                print(f"{file}:{change.node.lineno}: SURVIVED: {old!r} -> {change.new!r}")
                sys.stdout.flush()
        finally:
            path.write_text(text)
    print(f"{file}: {tried} changes, {survived} of them not noticed")
    sys.stdout.flush()
    return survived


def main() -> int:
    """Run what the command line asks for."""
    words = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        folder = Path(name)
        packages = copy_repository(folder)
        files = [file for file in SWEEPS if not words or any(word in file for word in words)]
        survived = sum([sweep(file, folder, packages) for file in files])
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
