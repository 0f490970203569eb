"""Operator calls on distributed tensors, from torch's dispatcher to kernels on local tensors.

``dispatch`` is where they come in: a call of a kind that was seen before is ``quick``; others are
bound, and then run by a decomposition, by the ``plan`` that a rule makes, or by the ``fallback``.
"""
