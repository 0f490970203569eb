"use strict";
/* The page of a run: its checkpoints, their sizes, how long saves held it up, how weights move. */

const steps = data.steps;
const isPlain = new Set(steps.map((step) => step.number)).size === steps.length;
const labelOf = new Map(steps.map((step) => [step.name, isPlain ? String(step.number) : step.name]));
const labels = steps.map((step) => plain(labelOf.get(step.name)));
const ordered = (title) => ({ title: { text: title }, type: "category" });
const line = (name, x, y) => ({ type: "scatter", mode: "lines+markers", name: plain(name), x, y });
const legend = { orientation: "h", x: 0, y: 1, yanchor: "bottom" };

section("facts", "Run", facts(data.facts));

const isLent = steps.some((step) => step.bases.length);
const sizes = [...steps.map((step) => step.own_bytes), ...steps.map((step) => step.tensor_bytes)];
section("sizes", "Sizes",
  isLent ? element("p", { class: "dim" }, "Checkpoints that refer to files of earlier ones have more tensors than bytes of their own.") : null,
  chart("Bytes of checkpoints by step", true, [
    { type: "bar", name: "its own files", x: labels, y: steps.map((step) => step.own_bytes), text: steps.map((step) => size(step.own_bytes)), textposition: "none", hovertemplate: "%{x}: %{text}<extra>its own files</extra>" },
    { ...line("its tensors", labels, steps.map((step) => step.tensor_bytes || null)), text: steps.map((step) => size(step.tensor_bytes)), hovertemplate: "%{x}: %{text}<extra>its tensors</extra>" },
  ], { xaxis: ordered("step"), yaxis: byteAxis(sizes), legend }));

/** Return the charts and tables of how weights moved. */
function drift({ pairs, parts, modules, num_steps, num_compared }) {
  const told = (key) => `${labelOf.get(key.from)} to ${labelOf.get(key.to)}`;
  const x = pairs.map((pair) => plain(told(pair)));
  const logarithm = (value) => (numeric(value) > 0 && numeric(value) < Infinity ? Math.log10(numeric(value)) : null);
  const word = (value) => (value === null ? "not in both" : value === 0 ? "unchanged" : value === "inf" ? "was zero" : figure(value));
  const words = (pair, at) => (pair.odd.includes(at) ? `${pair.modules[at] ? `${word(pair.modules[at])}; ` : ""}NaN or Inf` : word(pair.modules[at]));
  const finite = pairs.flatMap((pair) => pair.modules).map(logarithm).filter((value) => value !== null);
  const made = [element("p", { class: "dim" }, "The length of the difference over the length of what was there, tensors that have not changed included; of values that are finite in both, and without tensors of integers. A gap is where nothing changed, or all was zero; red is where there are NaN or infinities since.")];
  if (num_compared < num_steps) made.push(element("p", {}, `${figure(num_compared)} of ${figure(num_steps)} checkpoints were compared, spread evenly: --max-steps sets how many.`));
  for (const pair of pairs) if (pair.problem) made.push(element("p", { class: "bad" }, `${told(pair)}: ${pair.problem}`));
  const whole = pairs.filter((pair) => !pair.problem);
  if (!whole.length) return [...made, element("p", {}, "There are no two checkpoints that can be compared.")];
  const counts = table(
    [{ title: "Step" }, { title: "Weights in both", right: true }, { title: "Changed", right: true }, { title: "In one alone, or of another shape", right: true }, { title: "NaN, Inf since", wide: true }],
    whole.map((pair) => [told(pair), figure(pair.num_weights), figure(pair.num_changed), figure(pair.num_apart), pair.num_bad ? element("span", { class: "bad" }, bad(pair)) : ""]));
  if (!whole.some((pair) => pair.num_changed)) return [...made, element("p", {}, "No weights that two checkpoints have in common have changed."), counts];
  const low = Math.floor(finite.reduce((one, other) => Math.min(one, other), finite[0] ?? -1));
  const high = Math.max(Math.ceil(finite.reduce((one, other) => Math.max(one, other), low)), low + 1);
  const powers = [...Array(high - low + 1).keys()].map((n) => low + n);
  made.push(chart("Drift by part of the state", false, parts.map((part, at) => line(part, x, pairs.map((pair) => (logarithm(pair.parts[at]) === null ? null : pair.parts[at])))),
    { xaxis: ordered("from step to step"), yaxis: { title: { text: "relative drift" }, type: "log", exponentformat: "power", dtick: 1 }, legend, showlegend: true }));
  const map = chart("Drift by module", true, [{
    type: "heatmap", x, y: modules.map(plain), z: modules.map((_, at) => pairs.map((pair) => logarithm(pair.modules[at]))),
    text: modules.map((_, at) => pairs.map((pair) => words(pair, at))), hovertemplate: "%{y}<br>%{x}: %{text}<extra></extra>", hoverongaps: true,
    colorscale: "Viridis", zmin: low, zmax: high, colorbar: { tickvals: powers, ticktext: powers.map((power) => `10<sup>${power}</sup>`) }, xgap: 1, ygap: 1,
  }, {
    type: "heatmap", x, y: modules.map(plain), z: modules.map((_, at) => pairs.map((pair) => (pair.odd.includes(at) ? 1 : null))),
    colorscale: [[0, "#d62728"], [1, "#d62728"]], showscale: false, hoverinfo: "skip", xgap: 1, ygap: 1,
  }], { xaxis: ordered("from step to step"), yaxis: { type: "category", autorange: "reversed", dtick: 1, tickfont: { size: 10 } } });
  map.style.height = `${Math.max(15 * modules.length + 110, 200)}px`;
  made.push(element("h3", {}, "By module"), map,
    asTable([{ title: "Module", wide: true }, ...pairs.map((pair) => ({ title: told(pair), right: true }))], modules.map((module, at) => [module, ...pairs.map((pair) => words(pair, at))])));
  made.push(element("h3", {}, "What changed"), counts);
  made.push(element("h3", {}, "What moved most"), table(
    [{ title: "Step" }, { title: "Tensor", wide: true }, { title: "Drift", right: true }, { title: "Max abs", right: true }],
    whole.flatMap((pair) => pair.most.map(([name, relative, largest]) => [told(pair), name, figure(relative), figure(largest)]))));
  return made;
}

function bad(pair) {
  const named = pair.bad.map(([name, nan, inf]) => `${name} (${figure(nan)} NaN, ${figure(inf)} Inf)`);
  if (pair.num_bad > named.length) named.push(`${figure(pair.num_bad - named.length)} more`);
  return named.join(", ");
}

if (data.drift) section("drift", "Drift of weights", ...drift(data.drift));

if (data.stalls) {
  const held = new Map(data.stalls.map((one) => [one.step, one]));
  const of = (key) => steps.map((step) => held.get(step.number)?.[key] ?? null);
  section("stalls", "Stalls", element("p", { class: "dim" }, "How long saves held the training up, and how long they took in all: the slowest rank of each."),
    chart("Seconds of saves by step", true, [line("held up", labels, of("stall")), line("in all", labels, of("seconds"))], { xaxis: ordered("step"), yaxis: { title: { text: "seconds" }, rangemode: "tozero" }, legend }),
    asTable([{ title: "Step", right: true }, { title: "Held up", right: true }, { title: "In all", right: true }], data.stalls.map((one) => [figure(one.step), figure(one.stall), figure(one.seconds)])));
}

section("steps", "Checkpoints", table(
  [{ title: "Step", right: true }, { title: "Name", wide: true }, { title: "Saved" }, { title: "Tensors", right: true }, { title: "Their bytes", right: true }, { title: "Own files", right: true }, { title: "Refers to", wide: true }, { title: "State", wide: true }],
  steps.map((step) => [figure(step.number), step.name, step.saved, figure(step.num_tensors), size(step.tensor_bytes), size(step.own_bytes), step.bases.join(", "),
    element("span", { class: step.state === "damaged" && "bad" }, [step.state, ...step.marks, step.problem].filter(Boolean).join(", "))])));

document.documentElement.dataset.ready = "true";
