"""Mutants of what goes on beside the weights."""

from __future__ import annotations

from .mutant import Mutant

_COORDINATES = ("tests/checkpoint/job_state/test_coordinates.py",)
_PLACES = ("tests/checkpoint/job_state/test_stream_places.py",)
_NUMBERS = ("tests/checkpoint/job_state/test_random_numbers.py",)
_DEALING = ("tests/checkpoint/job_state/test_agreeing_counters.py",)

MUTANTS = [
    Mutant(
        name="job: values go by the position of a rank, not by its coordinate",
        file="checkpoint/loading/coordinate_matching.py",
        old="        rank = rank_component(self.saved.rank(coordinate))\n",
        new="        rank = rank_component(self.saved.all_ranks()[0])\n",
        tests=_COORDINATES,
    ),
    Mutant(
        name="job: values of one coordinate are not compared",
        file="checkpoint/saving/agreeing.py",
        old="            check_copies(parts)\n",
        new="",
        tests=_COORDINATES,
    ),
    Mutant(
        name="job: other sizes are taken for the same",
        file="checkpoint/loading/coordinate_matching.py",
        old="        has_moved = _sizes(dealing.saved) != _sizes(dealing.wanted)\n",
        new="        has_moved = False\n",
        tests=_COORDINATES,
    ),
    Mutant(
        name="job: new ranks repeat the streams of others",
        file="checkpoint/job_state/stream_places.py",
        old="    was_there = repeats or all(",
        new="    source = tuple(i % n for i, n in zip(source, saved.shape, strict=True))\n"
        "    was_there = True or all(",
        tests=_PLACES,
    ),
    Mutant(
        name="job: streams that were the same begin apart",
        file="checkpoint/job_state/stream_places.py",
        old="    own = tuple(0 if axis in shared else i for axis, i in here.items())\n",
        new="    own = tuple(here.values())\n",
        tests=_PLACES,
    ),
    Mutant(
        name="job: random numbers are set in the order of names",
        file="checkpoint/loading/match.py",
        old="key=lambda n: (n in self.last, after_its_parts(n))",
        new="key=after_its_parts",
        tests=_NUMBERS,
    ),
    Mutant(
        name="job: all loaders are told what each had taken",
        file="checkpoint/job_state/dealing.py",
        old="    share, left = divmod(count * dealing.saved.size, dealing.wanted.size)\n",
        new="    share, left = count, 0\n",
        tests=_DEALING,
    ),
]
