"""Rules that place the tensors of a checkpoint on another mesh, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dtckpt.errors import LayoutMismatch, PlacementError

from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Placement, parse_placements
from ..files.manifest import Manifest
from ..files.stored_tensor import StoredTensor

_MAX_PROBLEMS = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors whose name matches a shell-style pattern get these placements.

    >>> Rule.parse("model/*.weight=S(0),R").placements
    (Shard(dim=0, order=None), Replicate())
    """

    pattern: str
    placements: tuple[Placement, ...]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Return the rule of ``PATTERN=PLACEMENT,PLACEMENT,...``, one placement per mesh axis."""
        pattern, equals, placements = text.rpartition("=")
        if not equals or not pattern:
            raise PlacementError(
                f"not a rule: {text!r}; expected a form like 'model/*.weight=S(0),R'"
            )
        return cls(pattern.strip(), parse_placements(placements))


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules of a text, separated by ``;``."""
    return tuple(Rule.parse(part.strip()) for part in text.split(";") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A stored tensor and the layout that it is to have."""

    tensor: StoredTensor
    layout: Layout | IrregularLayout
    rule: Rule | None = None
    """The rule that placed it, if one did."""
    note: str = ""
    """Why no rule did."""

    @property
    def stays(self) -> bool:
        """Whether it is what a rank kept for itself."""
        return is_of_rank(self.tensor)


def place(manifest: Manifest, mesh: Mesh, rules: Sequence[Rule]) -> list[Placed]:
    """Return every tensor with its new layout.

    The first rule that matches a tensor's name places it. Tensors that no rule matches and 0-d
    tensors are replicated, and what a rank kept for itself (PerRank) stays with its rank. Raises
    LayoutMismatch listing the tensors that their rule does not fit, and the rules that match none:
    a misspelt one would leave its tensors replicated.
    """
    placed = all_placed(
        manifest.tensors.values(),
        lambda tensor: _place(tensor, mesh, rules),
        "the rules do not fit the checkpoint",
    )
    _check_used(rules, manifest)
    return placed


def all_placed(
    tensors: Iterable[StoredTensor], place_one: Callable[[StoredTensor], Placed], problem: str
) -> list[Placed]:
    """Return tensors with what ``place_one`` says; one LayoutMismatch for all that it refuses."""
    placed: list[Placed] = []
    problems: list[str] = []
    for tensor in tensors:
        try:
            placed.append(place_one(tensor))
        except (PlacementError, LayoutMismatch) as error:
            problems.append(f"tensor {tensor.name!r}: {error}")
    if problems:
        rest = len(problems) - _MAX_PROBLEMS
        shown = problems[:_MAX_PROBLEMS] + ([f"and {rest} more tensors"] if rest > 0 else [])
        raise LayoutMismatch(f"{problem}:\n  " + "\n  ".join(shown))
    return placed


def is_of_rank(tensor: StoredTensor) -> bool:
    """Whether it is something that a rank kept for itself."""
    return any(part.startswith("@") for part in tensor.name.split("/"))


def _check_used(rules: Sequence[Rule], manifest: Manifest) -> None:
    """Raise LayoutMismatch for rules whose pattern is that of no tensor."""
    idle = [
        rule.pattern
        for rule in rules
        if not any(fnmatchcase(name, rule.pattern) for name in manifest.tensors)
    ]
    if idle and manifest.tensors:
        names = list(manifest.tensors)
        more = f" and {len(names) - _MAX_PROBLEMS} more" if len(names) > _MAX_PROBLEMS else ""
        raise LayoutMismatch(
            f"no tensor has a name that fits {', '.join(map(repr, idle[:_MAX_PROBLEMS]))}. The "
            f"checkpoint has {', '.join(names[:_MAX_PROBLEMS])}{more}. Mend the "
            "pattern, or leave the rule out"
        )


def _place(tensor: StoredTensor, mesh: Mesh, rules: Sequence[Rule]) -> Placed:
    if is_of_rank(tensor):
        return Placed(tensor=tensor, layout=tensor.layout, note="stays with its rank")
    rule = next((rule for rule in rules if fnmatchcase(tensor.name, rule.pattern)), None)
    if rule is None or not tensor.shape:
        note = "no rule" if rule is None else "0-d"
        return Placed(
            tensor=tensor, layout=Layout.replicated(mesh, tensor.shape), rule=rule, note=note
        )
    layout = Layout(mesh, rule.placements, tensor.shape)
    if layout.is_partial:
        raise PlacementError(f"rule {rule.pattern!r}: a checkpoint holds no Partial tensors")
    return Placed(tensor=tensor, layout=layout, rule=rule)
