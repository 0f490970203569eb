"""How operators treat placements: one family of operators a file.

The families fill the tables when they are imported, which is here; README.md tells how.
"""

from __future__ import annotations

from ..tensor.schemas import Op, base_name, functional_of, is_foreach, is_pointwise
from . import activation as activation
from . import as_strided as as_strided
from . import attention as attention
from . import batch_norm as batch_norm
from . import contraction as contraction
from . import convolution as convolution
from . import creation as creation
from . import diagonal as diagonal
from . import distributions as distributions
from . import embedding as embedding
from . import extremes as extremes
from . import fft as fft
from . import foreach_norm as foreach_norm
from . import gather_scatter as gather_scatter
from . import group_norm as group_norm
from . import histogram as histogram
from . import indexing as indexing
from . import joining as joining
from . import layer_norm as layer_norm
from . import linalg as linalg
from . import loss as loss
from . import multinomial as multinomial
from . import nll_loss as nll_loss
from . import norm as norm
from . import optimizer_steps as optimizer_steps
from . import packed_sequence as packed_sequence
from . import padding as padding
from . import pointwise as pointwise
from . import pooling as pooling
from . import random as random
from . import rearranging as rearranging
from . import reduction as reduction
from . import resampling as resampling
from . import scan as scan
from . import slicing as slicing
from . import softmax as softmax
from . import sorting as sorting
from . import variance as variance
from . import views as views
from .engine.table import RULES, OpCall, Rule, RuleMaker
from .unread_numbers import UNREAD

NOT_ELEMENTWISE = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})
"""Operators on lists that reduce each tensor of them."""


def rule_maker(op: Op) -> RuleMaker | None:
    """Return what makes the rule of a functional operator, if the table has one."""
    maker = RULES.get(op)
    if maker is not None:
        return maker
    if is_pointwise(op) or (is_foreach(op) and base_name(op) not in NOT_ELEMENTWISE):
        return pointwise.pointwise_rule
    return None


def find_rule(op: Op, call: OpCall) -> Rule | None:
    """Return the rule of one call, if there is one."""
    maker = rule_maker(op)
    return None if maker is None else maker(call)


def counts_by_type(op: Op, name: str) -> bool:
    """Whether a plan of an operator serves all values of one type that a number of it may have."""
    functional = functional_of(op) or op
    if functional in RULES.by_users:  # a rule of the user's may read all numbers
        return False
    if rule_maker(functional) is pointwise.pointwise_rule:
        return True
    return name in UNREAD.get(functional, ())
