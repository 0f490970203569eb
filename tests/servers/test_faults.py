"""Each fault at each kind of request: it is got past, or one error is told and nothing is lost.

All of it by ``make test-faults``, some lines elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

from .every import CHOSEN, IS_WHOLE
from .fake_gcs import FakeGcs
from .fake_s3 import FakeS3
from .faults import Fault
from .matrix import OPERATIONS, Operation, Row, counts_of, rows_of, run_row
from .scene import SMALL, begun

# Drivers warn of their own deprecations, and of what they do themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]

OWN: dict[str, Callable[[], FakeS3]] = {"fake-s3": FakeS3, "fake-gcs": FakeGcs}
NEEDS = {"fake-s3": "s3fs", "fake-gcs": "gcsfs", "obstore": "obstore"}
QUICK = {("slow down", 2), ("reply lost", 2), ("denied", None)}
AT_A_TIME, HEAVY_AT_A_TIME = {"fsspec": 8, "obstore": 16}, 4
"""Most of them wait most of the time, but drivers of fsspec have one loop for all of a process."""


def is_chosen(row: Row) -> bool:
    """Whether a line is looked at here."""
    return IS_WHOLE or (row.trouble.name, row.limit) in QUICK


def maker(name: str, engine: str) -> Callable[[], FakeS3]:
    """Return what makes a server of our own, which this engine can reach."""
    needed = NEEDS["obstore" if engine == "obstore" else name]
    if find_spec(needed) is None:
        pytest.skip(f"pip install {needed}")
    return OWN[name]


CHOSEN_OPERATIONS = [one for one in OPERATIONS if IS_WHOLE or one.columns == SMALL]


@pytest.mark.parametrize("operation", CHOSEN_OPERATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
@pytest.mark.parametrize("name", [name for name in CHOSEN if name in OWN])
def test_faults(name: str, engine: str, operation: Operation) -> None:
    make = maker(name, engine)
    rows = [row for row in rows_of(operation, counts_of(operation, make, engine)) if is_chosen(row)]
    at_a_time = AT_A_TIME[engine] if operation.columns == SMALL else HEAVY_AT_A_TIME
    with ThreadPoolExecutor(at_a_time) as pool:
        running = [pool.submit(run_row, row, make, engine) for row in rows]
        wrong = [told for one in running if (told := one.result())]
    assert not wrong, f"{len(wrong)} of {len(rows)} lines:\n" + "\n".join(wrong)


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
@pytest.mark.parametrize("name", [name for name in CHOSEN if name in OWN])
def test_a_fifth_of_all_requests_is_refused(name: str, engine: str) -> None:
    with maker(name, engine)() as server:
        scene = begun(server, engine, world=4)
        server.faults = [Fault(share=0.2)]
        for step in range(2, 12 if IS_WHOLE else 5):
            scene.all_do(lambda _, group, step=step: scene.save(step, group))
            scene.all_do(lambda _, group, step=step: scene.load(step, group))
            assert all((state["w"].to_local() == step).all() for state in scene.loaded[-4:])
        assert server.faults[0].hits > 0
