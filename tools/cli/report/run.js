"use strict";
/* The page of a run: its checkpoints, their sizes, how long saves held it up, how weights move. */

const steps = data.steps;
const numbers = steps.map((step) => step.number);
const line = (name, y, more = {}) => ({ type: "scatter", mode: "lines+markers", name, x: numbers, y, connectgaps: true, ...more });
const byStep = (title, more = {}) => ({ xaxis: { title: { text: "step" } }, yaxis: { title: { text: title }, rangemode: "tozero", exponentformat: "SI", ...more }, legend: { orientation: "h" } });

section("facts", "Run", facts(data.facts));

section("sizes", "Sizes", chart("Bytes of checkpoints by step", true, [
  { type: "bar", name: "own files", x: numbers, y: steps.map((step) => step.own_bytes), hovertemplate: "%{x}: %{y:.4s}B<extra>own</extra>" },
  { type: "bar", name: "of earlier ones", x: numbers, y: steps.map((step) => step.borrowed_bytes), hovertemplate: "%{x}: %{y:.4s}B<extra>of earlier ones</extra>" },
], { ...byStep("bytes"), barmode: "stack" }));

if (data.drift) {
  const overall = new Map(data.drift.map((one) => [one.to, one]));
  const parts = [...new Set(data.drift.flatMap((one) => Object.keys(one.parts)))];
  section("drift", "Drift of weights", element("p", { class: "dim" }, "How far tensors that have changed have moved since the checkpoint before: the length of the difference over the length of what was there, by part of the state."),
    !parts.length ? element("p", {}, "Nothing that two checkpoints have in common has changed.") : chart("Drift by step", true, parts.map((part) => line(part, numbers.map((number) => overall.get(number)?.parts[part] ?? null))), byStep("relative L2")),
    parts.length ? element("h3", {}, "What moved most") : null,
    !parts.length ? null : table([{ title: "From", right: true }, { title: "To", right: true }, { title: "Tensor", wide: true }, { title: "Drift", right: true }, { title: "Max abs", right: true }, { title: "NaN, Inf", right: true }],
      data.drift.flatMap((one) => one.most.map((row) => [figure(one.from), figure(one.to), row.name, figure(row.drift), figure(row.max_abs), row.bad ? element("span", { class: "bad" }, figure(row.bad)) : "0"]))));
}

if (data.stalls) {
  const held = new Map(data.stalls.map((one) => [one.step, one]));
  section("stalls", "Stalls", element("p", { class: "dim" }, "How long saves held the training up, and how long they took in all: the slowest rank of each."),
    chart("Seconds of saves by step", true, [line("held up", numbers.map((number) => held.get(number)?.stall ?? null)), line("in all", numbers.map((number) => held.get(number)?.seconds ?? null))], byStep("seconds")));
}

section("steps", "Checkpoints", table(
  [{ title: "Step", right: true }, { title: "Name", wide: true }, { title: "Saved" }, { title: "Tensors", right: true }, { title: "Bytes", right: true }, { title: "Own", right: true }, { title: "Refers to", wide: true }, { title: "State" }],
  steps.map((step) => [figure(step.number), step.name, step.created || "", figure(step.num_tensors), size(step.own_bytes + step.borrowed_bytes), size(step.own_bytes), step.bases.join(", "),
    step.problem ? element("span", { class: "bad" }, step.problem) : step.marks.join(", ") || "committed"])));

document.documentElement.dataset.ready = "true";
