"""Saves and loads as spans and metrics of OpenTelemetry, where that is installed."""

from __future__ import annotations

import importlib
from typing import Any

from .costs import Costs
from .observers import Occasion

_SCOPE = "dtckpt.checkpoint"


class OpenTelemetry:
    """Tells OpenTelemetry what saves and restores cost: ``CheckpointManager(on_cost=...)``.

    A span ``dtckpt.save`` or ``dtckpt.restore`` with one within it for each phase, from when to
    when it was (attributes ``dtckpt.rank``, ``dtckpt.step``, ``dtckpt.url``, ``dtckpt.bytes``), and
    metrics ``dtckpt.duration`` and ``dtckpt.stall`` by kind, ``dtckpt.phase.duration`` by kind and
    phase, all in seconds, and ``dtckpt.phase.io`` in bytes. Of metrics the rank is none of the
    attributes: the resource of the process tells it.

    Providers are those of the process unless given. ImportError where the API is not installed:
    ``pip install "dtckpt[otel]"``.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        trace, metrics = _api("trace"), _api("metrics")
        self._within = trace.set_span_in_context
        self._tracer = (tracer_provider or trace.get_tracer_provider()).get_tracer(_SCOPE)
        meter = (meter_provider or metrics.get_meter_provider()).get_meter(_SCOPE)
        self._duration = meter.create_histogram(
            "dtckpt.duration", unit="s", description="From the call to the end"
        )
        self._stall = meter.create_histogram(
            "dtckpt.stall", unit="s", description="How long the training was held up"
        )
        self._phase_duration = meter.create_histogram(
            "dtckpt.phase.duration", unit="s", description="Work of this rank in a phase"
        )
        self._phase_io = meter.create_counter(
            "dtckpt.phase.io", unit="By", description="Bytes that a phase has moved"
        )

    def __call__(self, costs: Costs, occasion: Occasion) -> None:
        """Tell what a save or restore cost."""
        self._trace(costs, occasion)
        kind = {"dtckpt.kind": occasion.kind}
        self._duration.record(costs.seconds, kind)
        self._stall.record(costs.stall_seconds, kind)
        for phase in costs.phases:
            attributes = {**kind, "dtckpt.phase": phase.phase}
            self._phase_duration.record(phase.seconds, attributes)
            if phase.num_bytes:
                self._phase_io.add(phase.num_bytes, attributes)

    def _trace(self, costs: Costs, occasion: Occasion) -> None:
        attributes = {
            "dtckpt.rank": costs.rank,
            "dtckpt.step": occasion.step,
            "dtckpt.url": costs.url,
            "dtckpt.stall_seconds": costs.stall_seconds,
        }
        whole = self._tracer.start_span(
            f"dtckpt.{occasion.kind}",
            # Not what the thread that happens to end the save is at.
            context=importlib.import_module("opentelemetry.context").Context(),
            start_time=_nanoseconds(costs.started_at),
            attributes=attributes,
        )
        within = self._within(whole)
        for span in costs.spans:
            made = self._tracer.start_span(
                f"dtckpt.{occasion.kind}.{span.phase}",
                context=within,
                start_time=_nanoseconds(span.started_at),
                attributes={"dtckpt.bytes": span.num_bytes} if span.num_bytes else None,
            )
            made.end(_nanoseconds(span.started_at + span.seconds))
        whole.end(_nanoseconds(costs.started_at + costs.seconds))


def _api(name: str) -> Any:
    try:
        return importlib.import_module(f"opentelemetry.{name}")
    except ImportError as error:
        raise ImportError(
            f"OpenTelemetry() needs opentelemetry-api, which cannot be imported: {error}. Install "
            'it with: pip install "dtckpt[otel]"'
        ) from error


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
