"""Every runnable example in a docstring is run."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch.distributed as dist

from .test_packaging import modules, modules_of_tools

NAMES = [*(name for name, _ in modules()), *modules_of_tools()]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("__main__")])
def test_examples_in_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if not name.startswith("dtckpt.integrations."):
            raise
        pytest.skip(str(error))
    runner = doctest.DocTestRunner()
    for each in doctest.DocTestFinder().find(module):
        if each.examples:  # a run looks at every file that lines were ever read of
            runner.run(each)
    if dist.is_initialized():  # a mesh of one rank makes its own group
        dist.destroy_process_group()
    assert runner.failures == 0
