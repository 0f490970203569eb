"""Training whose bits do not depend on the mesh: any number of ranks goes on where another was."""

from __future__ import annotations

from .parts import Parts
from .sampler import ElasticSampler
from .steps import ElasticSteps

__all__ = ["ElasticSampler", "ElasticSteps", "Parts"]
