"""The random numbers of a mesh: a seed and a count of draws, the same on all of its ranks.

Every operator that draws random numbers for a distributed tensor makes one draw of the tensor's
mesh. A number depends on the seed, on how many draws came before, and on the global index of its
element, so it is the same for every mesh and layout, and replicas agree without communication.

A mesh that nobody has seeded takes ``torch.initial_seed()`` of its first rank, and draws from a
stream of that seed which no other mesh of its ranks has: parameters on two meshes of one model
never get the same numbers. A later ``torch.manual_seed`` counts; every rank of the mesh has to call
it, be it with a seed of its own. A rank that does so alone gets PlacementError when the job's
timeout has passed, or after a minute if it was the seed that there was, and then at every draw of
the mesh, until all ranks call ``manual_seed``. A mesh that was seeded by that does not follow
torch, and two that were given one seed draw the same. ``generator=`` arguments are refused, since a
generator belongs to one rank.

``torch.utils.checkpoint`` draws the same numbers when it runs a function again, by
``preserve_rng_state``, which is its default; where that is off, by ``replayed``.
"""

from .state import (
    RngState,
    get_rng_state,
    is_rng_supported_mesh,
    manual_seed,
    replayed,
    set_rng_state,
)

__all__ = [
    "RngState",
    "get_rng_state",
    "is_rng_supported_mesh",
    "manual_seed",
    "replayed",
    "set_rng_state",
]
