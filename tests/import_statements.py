"""What files import, without running them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return the import statements of a file, those inside of functions included."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
