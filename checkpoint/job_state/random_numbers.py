"""``RandomNumbers``: the generators of all ranks in a checkpoint, by coordinates of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor

from dtckpt.errors import LayoutMismatch
from dtckpt.logs import logger_of

from ...dtensor.mesh.device_mesh import DeviceMesh
from ...dtensor.random.state import get_rng_state, set_rng_state
from ..state.coordinates import Axes, Coordinate, Dealing, PerCoordinate
from .stream_places import Begins, GoesOn, digests_by_stream, place_of_stream
from .streams import Stream, streams_of

logger = logger_of("checkpoint")

_STREAMS, _DIGESTS, _STATES, _ELEMENTS = "streams", "digests", "states", "elements"


class RandomNumbers:
    """The random generators of this process, which go on where they were saved, in the state.

    They are torch's of the CPU and of every accelerator that the process sees, unless ``process``
    is False, numpy's and Python's global ones where asked for, and further ``generators`` by names.
    Every rank makes it alike. Where ``mesh`` is one of dtckpt, what it draws by element is part of
    it.

    Each coordinate of ``mesh`` along ``axes``, by default all of its axes, has states of its own,
    and ranks that differ along other axes only have the same, as ranks of tensor parallelism mostly
    must: ``RandomNumbers(mesh, axes="dp")``. That is checked at the save. Without a mesh each rank
    has its own. ``axes`` are as for ``PerCoordinate``.

    On another mesh

    * a coordinate that was there goes on with its state, whatever the rank's number is;
    * along an axis on which all states were the same, they are the same on the new one;
    * a coordinate that is new, or has a number above 0 along an axis that is new, begins with a
      seed that is a function of what was saved and of the coordinate: the same whenever this
      checkpoint is loaded on that mesh, and another one for each;
    * along an axis that is gone the states of its first coordinate count.

    With ``resize="repeat"`` coordinates that are new take the states of those that were there, in
    turn, instead of beginning: ranks whose numbers are neighbours in a group that has to draw alike
    then do, though no mesh says so, and other new ones draw what earlier ones draw.

    The report lists it as ``dealt`` where a state did not come from the same coordinate. A
    generator that was asked for by name and was not saved is refused; a device of a kind that was
    not there keeps its state, with a warning.

    It is asked after all other objects at a save, and set after all others at a load: what these
    draw meanwhile changes nothing.

    >>> own = torch.Generator().manual_seed(1)
    >>> numbers = RandomNumbers(process=False, generators={"own": own})
    >>> saved = numbers.state_dict()
    >>> first = torch.rand(2, generator=own)
    >>> numbers.load_state_dict(saved)
    >>> torch.equal(torch.rand(2, generator=own), first)
    True
    """

    comes_last = True

    def __init__(
        self,
        mesh: Any = None,
        *,
        axes: Axes | None = None,
        resize: Literal["begin", "repeat"] = "begin",
        process: bool = True,
        numpy: bool = False,
        python: bool = False,
        generators: Mapping[str, torch.Generator] | None = None,
    ) -> None:
        if resize not in ("begin", "repeat"):
            raise ValueError(f"resize is 'begin' or 'repeat', got {resize!r}")
        self._mesh = mesh
        self._axes = axes
        self._repeats = resize == "repeat"
        self._process, self._numpy, self._python = process, numpy, python
        self._generators = dict(generators or {})
        self._streams()  # raises for a name that is taken

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators: bytes, as this rank has them."""
        states = {name: stream.read() for name, stream in self._streams().items()}
        value: dict[str, Any] = {
            _DIGESTS: {name: _digest(state) for name, state in states.items()},
            _STATES: states,
        }
        if isinstance(self._mesh, DeviceMesh):
            value[_ELEMENTS] = dict(get_rng_state(self._mesh))
        return self._told(value)

    def state_template(self) -> dict[str, Any]:
        """Return the form of the state."""
        return self._told({})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the generators that a state has."""
        value: Mapping[str, Any] = state_dict[_STREAMS].value
        streams = self._streams()
        for name, state in value[_STATES].items():
            if name in streams:
                streams[name].write(state)
        if _ELEMENTS in value and isinstance(self._mesh, DeviceMesh):
            set_rng_state(value[_ELEMENTS], self._mesh)

    def _told(self, value: dict[str, Any]) -> dict[str, Any]:
        rule = _Rule(self._streams, self._required, repeats=self._repeats)
        return {_STREAMS: PerCoordinate(value, self._mesh, axes=self._axes, resize=rule)}

    def _streams(self) -> dict[str, Stream]:
        return streams_of(
            process=self._process,
            numpy=self._numpy,
            python=self._python,
            generators=self._generators,
        )

    def _required(self) -> list[str]:
        """Return the names of what was asked for by name."""
        asked = [("cpu", self._process), ("numpy", self._numpy), ("python", self._python)]
        return [*(name for name, is_asked in asked if is_asked), *self._generators]


class _Rule:
    """Which of the saved states the generators of this rank take."""

    def __init__(
        self,
        streams: Callable[[], dict[str, Stream]],
        required: Callable[[], list[str]],
        *,
        repeats: bool,
    ) -> None:
        self._streams, self._required, self._repeats = streams, required, repeats
        self._places: dict[str, GoesOn | Begins] = {}
        self._elements: Mapping[str, int] | None = None

    def sources(self, dealing: Dealing, peek: Callable[[Coordinate], Any]) -> Iterable[Coordinate]:
        """Return the coordinates whose states are read; LayoutMismatch where one is missing."""
        digests = digests_by_stream(dealing.saved, lambda at: peek(at)[_DIGESTS])
        self._elements = peek(next(dealing.saved.coordinates())).get(_ELEMENTS)
        for name in self._streams():
            found = digests.get(name, {})
            place = place_of_stream(name, dealing, found, repeats=self._repeats)
            if place is not None:
                self._places[name] = place
            elif name in self._required():
                raise LayoutMismatch(
                    f"no random state {name!r} was saved, only {sorted(digests)}; leave it out of "
                    "this RandomNumbers until the next save, or the whole out of the load"
                )
            else:
                logger.warning("no random state of %r was saved; it stays as it is", name)
        places = self._places.values()
        return dict.fromkeys(place.source for place in places if isinstance(place, GoesOn))

    def value(self, dealing: Dealing, values: Mapping[Coordinate, Any]) -> dict[str, Any]:
        """Return the states of this rank's generators."""
        streams = self._streams()
        states: dict[str, Tensor] = {}
        for name, place in self._places.items():
            if isinstance(place, GoesOn):
                states[name] = values[place.source][_STATES][name]
            else:
                states[name] = streams[name].begun(place.seed)
        made: dict[str, Any] = {_STATES: states}
        if self._elements is not None:
            made[_ELEMENTS] = self._elements
        return made


def _digest(state: Tensor) -> str:
    return blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
