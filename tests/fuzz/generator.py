"""Programs by seed: the same number always gives the same program."""

from __future__ import annotations

import random

import torch

from .drawing import Draw, Refused
from .lines import PRODUCERS
from .program import Input, Program, assigned_in, names_in

MESHES = {(2,): 6, (4,): 1.5, (2, 2): 3}
PROFILES = (*dict.fromkeys(producer.profile for producer in PRODUCERS), "strides")
MAX_LINES = 7
_ERROR_SHARE = 0.06
"""Of lines that raise on one device those that are kept, as the last one of their program."""
_HARMLESS = ("not implemented for", "expected scalar type", "must match the size")


def program_of(seed: int, number: int, only: frozenset[str] = frozenset()) -> Program:
    """Return a program; with ``only`` most lines are of these profiles."""
    source = random.Random(f"{seed}:{number}")
    mesh = source.choices(list(MESHES), list(MESHES.values()))[0]
    profile = only or _drawn_profile(source)
    draw = Draw(source, mesh, profile)
    wanted = source.randint(1, MAX_LINES)
    failures = 0
    weights = [p.weight * (6 if p.profile in profile else 1) for p in PRODUCERS]
    if only and only != frozenset({"strides"}):
        weights = [p.weight * (20 if p.profile in only else 1) for p in PRODUCERS]
    while len(draw.lines) < wanted and failures < 12:
        producer = source.choices(PRODUCERS, weights)[0]
        inputs, plain, runs = dict(draw.inputs), set(draw.plain_names), _copied(draw.runs)
        sealed = set(draw.sealed)
        try:
            line = producer.produce(draw)
        except (Refused, RuntimeError):  # the latter of views that torch forbids to look at
            failures += 1
            _forget(draw, inputs, plain, runs, sealed)
            continue
        if draw.add(line):
            continue
        failures += 1
        if draw.lines and source.random() < _ERROR_SHARE and _is_meant(draw.error):
            draw.lines.append(line)
            break
        _forget(draw, inputs, plain, runs, sealed)
    if draw.wants_grad:
        _add_gradients(draw)
    return _made(draw)


def _is_meant(error: Exception | None) -> bool:
    return error is not None and not any(text in str(error) for text in _HARMLESS)


def _copied(runs: list[dict[str, object]]) -> list[dict[str, object]]:
    return [dict(run) for run in runs]


def _forget(
    draw: Draw,
    inputs: dict[str, Input],
    plain: set[str],
    runs: list[dict[str, object]],
    sealed: set[int],
) -> None:
    for name in set(draw.inputs) - set(inputs):
        del draw.inputs[name], draw.values[name], draw.env[name]
    draw.plain_names = plain
    for own, other in zip(draw.runs, runs, strict=True):
        for name in set(own) - set(other):
            del own[name]
    draw.sealed = sealed


def _drawn_profile(source: random.Random) -> frozenset[str]:
    count = source.choices((1, 2, 3), (3, 4, 3))[0]
    return frozenset(source.sample(PROFILES, count))


def _add_gradients(draw: Draw) -> None:
    leaves = [name for name, given in draw.inputs.items() if given.grad]
    outputs = [
        name
        for name, value in draw.values.items()
        if name not in draw.inputs
        and value.requires_grad
        and (value.dtype.is_floating_point or value.dtype.is_complex)
    ]
    if not leaves or not outputs:
        return
    chosen = outputs[-1:]
    if len(outputs) > 2 and draw.chance(0.3):
        chosen.append(draw.one(outputs[:-1]))
    modules = [name for name in draw.env if name.endswith("_m")]
    wanted = ", ".join([*leaves, *(f"*{name}.parameters()" for name in modules)])
    how = "accumulated" if draw.chance(0.2) else "gradients"
    draw.add(f"g = {how}([{', '.join(chosen)}], [{wanted}])")


def _made(draw: Draw) -> Program:
    used = {name for line in draw.lines for name in names_in(line)}
    runs = tuple({k: v for k, v in run.items() if k in used} for run in draw.runs)
    assigned = {name for line in draw.lines for name in assigned_in(line)}
    return Program(
        mesh=draw.mesh,
        inputs={k: v for k, v in draw.inputs.items() if k in used or k in assigned},
        lines=tuple(draw.lines),
        runs=runs,
    )


def seeded() -> None:
    """Set what programs depend on beside their seeds."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
