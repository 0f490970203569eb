"""``dtckpt extract``: tensors, or parts of them, as one file or on stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ..common.console import count, iec, printable
from ..common.options import NAME, PLACE, debug_option, mapping_option, store_at, two_store_options
from ..common.telling import bar, json_option, print_json, quiet_option, say

if TYPE_CHECKING:
    from ....checkpoint import MappingTable


@click.command()
@click.argument("source", metavar="CHECKPOINT", type=PLACE)
@click.argument("parts", nargs=-1, required=True, metavar="NAME[SLICE]...", type=NAME)
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    metavar="FILE",
    help="Path or URL that ends in .npy or .safetensors; - writes what a .npy file has to stdout.",
)
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="Convert to a type of numpy that holds all values, such as float32 for bfloat16.",
)
@click.option("--bits", is_flag=True, help="Take elements as unsigned ints of the same bits.")
@json_option
@mapping_option
@two_store_options
@quiet_option
@debug_option
def extract(
    source: str,
    parts: tuple[str, ...],
    target: str,
    dtype: str | None,
    bits: bool,
    as_json: bool,
    mapping: MappingTable | None,
    source_options: dict[str, Any],
    target_options: dict[str, Any],
) -> None:
    """Write tensors of CHECKPOINT, or parts, to a file or stdout.

    SLICE is in brackets as in Python: ints, slices with positive steps, and ... are possible. A
    .npy file holds one tensor, a .safetensors file any number, under their names. Numpy has no
    bfloat16 and no types of 8 or 4 bits: give --dtype float32 or --bits for these.

    Streams in bounded memory, verifying what it reads. The file appears when it is whole, or not at
    all; none is replaced.

    \b
    Examples:
      dtckpt extract run/step-300 'model/weight[0:2,:3]' -o rows.npy
      dtckpt extract run/step-300 model/weight -o weight.safetensors
    """
    from ....checkpoint import extract as extract_parts
    from ....checkpoint.examining.extracting import place_of_file

    if target == "-" and as_json:
        raise click.UsageError("-o - and --json both write to stdout")
    if target != "-":
        store_at(place_of_file(target)[0], target_options, "TARGET")  # names what it refuses
    with store_at(source, source_options) as store, bar("extracting") as on_progress:
        report = extract_parts(
            store,
            parts,
            sys.stdout.buffer if target == "-" else target,
            dtype=dtype,
            bits=bits,
            mapping=mapping,
            target_options=target_options,
            on_progress=on_progress,
        )
    if target == "-":
        sys.stdout.flush()
        return
    if as_json:
        tensors = {
            name: {"dtype": report.dtypes[name], "shape": list(shape)}
            for name, shape in report.tensors.items()
        }
        print_json("extraction", {"file": target, "bytes": report.num_bytes, "tensors": tensors})
        return
    what = [f"{report.dtypes[name]}{list(shape)}" for name, shape in report.tensors.items()]
    told = what[0] if len(what) == 1 else count(len(what), "tensor")
    say(f"{printable(target)}: {told}, {iec(report.num_bytes)}")
