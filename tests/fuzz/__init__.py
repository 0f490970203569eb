"""Differential fuzzer: random programs on DTensors beside the same programs on one device.

``make fuzz`` runs it. ``programs`` has what it found, shrunk, as tests.
"""

from math import inf, nan

from .comparison import check
from .program import Input, Program

__all__ = ["Input", "Program", "check", "inf", "nan"]
