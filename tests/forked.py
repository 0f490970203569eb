"""Programs that end as Python ends, forked from one process that has imported what they need."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .python import LEAKS, run_python

# Of the names that are used here the programs see those that begin with an underscore.
_LAUNCHER = """
import json as _json, os as _os, sys as _sys
_folder, _imports, _programs = _json.loads(_sys.argv[1])
exec(_imports, {})
_pids = {}
for _name, (_text, *_arguments) in _programs.items():
    _pid = _os.fork()
    if _pid == 0:
        for _fd, _kind in ((1, "out"), (2, "err")):
            with open(f"{_folder}/{_name}.{_kind}", "w") as _file:
                _os.dup2(_file.fileno(), _fd)
        _sys.argv[1:] = _arguments
        break
    _pids[_name] = _pid
else:
    _codes = {name: _os.waitpid(pid, 0)[1] for name, pid in _pids.items()}
    print(_json.dumps({name: _os.waitstatus_to_exitcode(code) for name, code in _codes.items()}))
    _sys.exit()
exec(_text)
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    code: int
    out: str
    errors: str


def run_forked(
    programs: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    imports: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
) -> dict[str, Ended]:
    """Run programs at the same time, each given as its text and arguments, and return their ends.

    ``imports`` is run before any of them is forked.
    """
    given = json.dumps([str(folder), imports, {n: list(p) for n, p in programs.items()}])
    launched = run_python(
        "-W", "ignore", "-c", _LAUNCHER, given, env=os.environ | dict(env or {}), timeout=timeout
    )
    assert launched.returncode == 0, launched.stderr
    ended: dict[str, Ended] = {}
    for name, code in json.loads(launched.stdout).items():
        errors = LEAKS.sub("", (folder / f"{name}.err").read_text())
        ended[name] = Ended(code, (folder / f"{name}.out").read_text(), errors)
    return ended
