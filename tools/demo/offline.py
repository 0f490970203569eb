"""What the command line does with the final checkpoint: reshard, inspect, verify."""

from __future__ import annotations

import dtckpt.checkpoint as ck
from dtckpt.dtensor import Layout

from .checks import checkpoint_differences
from .s3 import Bucket
from .setting import Setting

_ON_DISK = (
    "dp=3,tp=2",
    "*.up.*=S(0),S(0); *.down.weight=S(0),S(1); *.out.weight=R,S(1); model/*=S(0),R; *=R,S(0)",
)
_IN_S3 = ("fsdp=5", "*=S(0)")


def reshard(demo: Setting, bucket: Bucket) -> list[str]:
    """Rewrite the final checkpoint on disk and into S3, compare, and return where both are."""
    source, local = str(demo.step(demo.plan.steps)), str(demo.output / "resharded")
    remote = f"{bucket.url}/step-{demo.plan.steps}"
    for target, (mesh, rules) in ((local, _ON_DISK), (remote, _IN_S3)):
        arguments = ("reshard", source, target, "--mesh", mesh, "--placements", rules)
        demo.say(demo.launcher.command(*arguments, secrets=bucket.environment()))
    with (
        ck.open(source) as final,
        ck.open(local) as on_disk,
        ck.open(remote, storage_options=bucket.storage_options()) as in_s3,
    ):
        _check_resharded(demo, final, on_disk, (3, 2))
        _check_resharded(demo, final, in_s3, (5,))
    return [local, remote]


def _check_resharded(
    demo: Setting, source: ck.Checkpoint, new: ck.Checkpoint, mesh: tuple[int, ...]
) -> None:
    differences = checkpoint_differences(source, new)
    same_values = new.manifest.tree == source.manifest.tree
    layouts = [new[name].layout for name in new]
    on_mesh = all(isinstance(layout, Layout) and layout.mesh.shape == mesh for layout in layouts)
    demo.claims.check(
        f"{new.url}: every tensor lies on a mesh of {' x '.join(map(str, mesh))} and is, bit for "
        "bit, that of the source",
        on_mesh and same_values and not differences,
        f"{len(new)} tensors and all values compared; differences: "
        f"{', '.join(differences) or 'none'}",
    )


def look(demo: Setting, bucket: Bucket, resharded: list[str]) -> None:
    """Show what ``dtckpt inspect`` and ``dtckpt verify`` say of everything that was written."""

    def run(*arguments: str) -> str:
        return demo.launcher.command(*arguments, secrets=bucket.environment())

    listed = run("inspect", str(demo.run))
    demo.say(listed)
    demo.claims.check(
        "inspect lists every committed step",
        all(f"step-{number}" in listed for number in demo.plan.saves),
    )
    for url in resharded:
        shown = run("inspect", url, "model/*blocks.0*", "--no-values")
        demo.say(shown)
        demo.claims.check("inspect shows the tensors and their layouts", _shows_layouts(shown))
    for url in (*(str(demo.step(number)) for number in demo.plan.saves), *resharded):
        demo.claims.check("verify: " + run("verify", url).strip(), holds=True)


def _shows_layouts(text: str) -> bool:
    return "blocks.0.up.weight" in text and "S(0)" in text
