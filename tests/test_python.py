"""Forked programs are what Python would have made of the same command line."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from .python import COMPILER, IMPORTS, run_python
from .waiting import wait_for

PROGRAM = """
import atexit, os, sys
atexit.register(print, "end")
print(__name__, sys.argv, sys.path[0] in ("", os.getcwd()), os.environ.get("WORD"))
print("torch" in sys.modules, "dtckpt" in sys.modules, sys.modules["__main__"].__name__)
class Named: ...
assert sys.modules["__main__"].Named is Named
import warnings; warnings.warn("told")
sys.exit(3)
"""


def test_a_program_is_run_as_its_own(tmp_path: Path) -> None:
    ran = run_python("-c", PROGRAM, "a", 1, cwd=tmp_path, env=os.environ | {"WORD": "x"})
    assert ran.returncode == 3
    lines = ["__main__ ['-c', 'a', '1'] True x", "True False __main__", "end"]
    assert ran.stdout.splitlines() == lines
    assert "UserWarning: told" in ran.stderr
    assert run_python("-W", "ignore", "-c", PROGRAM).stderr == ""
    assert "UserWarning: told" in run_python("-W", "error", "-c", PROGRAM).stderr


def test_a_file_and_a_module_are_run(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'beside'")
    (tmp_path / "page.py").write_text("import sys, beside; print(sys.argv, beside.word, __name__)")
    script = str(tmp_path / "page.py")
    assert run_python(script, "a").stdout == f"{[script, 'a']} beside __main__\n"
    made = run_python("-m", "page", "a", cwd=tmp_path).stdout
    assert made == f"{[script, 'a']} beside __main__\n"


def test_modules_are_imported_before() -> None:
    code = f"import sys; print({{*{IMPORTS!r}}} <= {{*sys.modules}}, {COMPILER!r} in sys.modules)"
    assert run_python("-c", code).stdout == "True True\n"
    assert run_python("-c", code, compiler=False).stdout == "True False\n"


def test_how_a_program_ends_is_told() -> None:
    failed = run_python("-c", "raise OSError('on fire')")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "OSError: on fire"
    killed = run_python("-c", "import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == -signal.SIGKILL


def test_a_program_that_does_not_end_is_killed_with_all_that_it_has_begun() -> None:
    hanging = "import os, time; os.fork(); print(os.getpgid(0), flush=True); time.sleep(600)"
    with pytest.raises(TimeoutError, match="no end after 1 s") as late:
        run_python("-c", hanging, timeout=1)
    group = int(str(late.value).splitlines()[1])
    wait_for(lambda: not is_there(group))


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_python_is_this_one() -> None:
    assert run_python("-c", "import sys; print(sys.version)").stdout.strip() == sys.version
