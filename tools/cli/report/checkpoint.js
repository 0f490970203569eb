"use strict";
/* The page of one checkpoint: bytes by module, tensors, layouts, balance, timing, a comparison. */

const tensors = data.tensors;
const numTensors = tensors.name.length;
const STEP = 100;
const shown = { order: [...Array(numTensors).keys()], key: null, isDown: false, limit: STEP, selected: null };

const columns = [
  { title: "Tensor", key: (i) => tensors.name[i] },
  { title: "Dtype", key: (i) => data.dtypes[tensors.dtype[i]] },
  { title: "Shape", key: (i) => tensors.shape[i].reduce((a, b) => a * b, 1), text: (i) => `[${tensors.shape[i].join(", ")}]` },
  { title: "Bytes", right: true, key: (i) => tensors.bytes[i], text: (i) => size(tensors.bytes[i]) },
  { title: "Layout", key: (i) => data.layouts[tensors.layout[i]].text },
];
if (data.statistics) {
  const number = (title, name) => columns.push({ title, right: true, key: (i) => numeric(data.statistics[name][i]), text: (i) => figure(data.statistics[name][i]) });
  number("Min", "min"); number("Max", "max"); number("Mean", "mean"); number("Std", "std");
  columns.push({ title: "NaN, Inf", right: true, key: (i) => data.statistics.bad[i], text: (i) => (data.statistics.bad[i] ? element("span", { class: "bad" }, figure(data.statistics.bad[i])) : "0") });
}

/** Return whether a name is wanted: a pattern if there are * or ? in it, else a part of the name. */
function matcher(text) {
  const wanted = text.trim();
  if (!wanted) return () => true;
  if (/[*?]/.test(wanted)) {
    const pattern = new RegExp(`^${wanted.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".")}$`, "i");
    return (name) => pattern.test(name);
  }
  const lower = wanted.toLowerCase();
  return (name) => name.toLowerCase().includes(lower);
}

const search = element("input", { id: "search", type: "search", placeholder: "Find tensors: a part of a name, or a pattern with *", "aria-label": "Find tensors", input: () => find(search.value) });
const told = element("span", { id: "told", role: "status", class: "dim" });
const body = element("tbody", {});
const more = element("button", { type: "button", click: () => { shown.limit += 5 * STEP; rows(); } });
const details = element("aside", { id: "details", hidden: true, tabindex: -1, "aria-label": "The tensor that is chosen" });

function find(text) {
  const wanted = matcher(text);
  shown.order = [...Array(numTensors).keys()].filter((i) => wanted(tensors.name[i]));
  shown.limit = STEP;
  sort();
}

function sort() {
  const column = columns[shown.key];
  if (column) {
    const sign = shown.isDown ? -1 : 1;
    const compare = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -sign : sign);
    shown.order.sort((a, b) => compare(column.key(a), column.key(b)) || a - b);
  }
  rows();
}

function rows() {
  const part = shown.order.slice(0, shown.limit);
  body.replaceChildren(...part.map((i) => element("tr", { "data-tensor": i, "aria-current": i === shown.selected && "true" },
    ...columns.map((column, at) => {
      const text = column.text ? column.text(i) : column.key(i);
      return at === 0
        ? element("td", { class: "wide" }, element("button", { type: "button", click: () => open(i) }, text))
        : element("td", { class: column.right && "right" }, text);
    }))));
  const bytes = shown.order.reduce((sum, i) => sum + tensors.stored[i], 0);
  told.textContent = `${figure(shown.order.length)} of ${figure(numTensors)} tensors, ${size(bytes)}`;
  more.hidden = shown.order.length <= shown.limit;
  more.textContent = `Show more (${figure(shown.order.length - part.length)} left)`;
}

function header(column, at) {
  const click = () => {
    shown.isDown = shown.key === at ? !shown.isDown : Boolean(column.right);
    shown.key = at;
    head.forEach((one, i) => one.setAttribute("aria-sort", i === at ? (shown.isDown ? "descending" : "ascending") : "none"));
    sort();
  };
  return element("th", { scope: "col", class: column.right && "right", "aria-sort": "none" }, element("button", { type: "button", click }, column.title));
}
const head = columns.map(header);

function markRow() {
  for (const row of body.children) {
    if (Number(row.dataset.tensor) === shown.selected) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

/** Show all that is known of a tensor, and go there. */
function open(i) {
  shown.selected = i;
  markRow();
  const layout = data.layouts[tensors.layout[i]];
  const pairs = [["Dtype", data.dtypes[tensors.dtype[i]]], ["Shape", `[${tensors.shape[i].join(", ")}]`], ["Bytes", `${size(tensors.bytes[i])} (${figure(tensors.bytes[i])})`], ["Layout", layout.text]];
  if (tensors.tied[i]) pairs.push(["Tied to", tensors.tied[i]]);
  if (data.statistics) for (const [label, name] of [["Min", "min"], ["Max", "max"], ["Mean", "mean"], ["Std", "std"], ["Zeros", "zeros"], ["NaN", "nan"], ["Inf", "inf"]]) pairs.push([label, figure(data.statistics[name][i])]);
  details.replaceChildren(
    element("button", { type: "button", style: "float:right", click: close }, "Close"),
    element("h2", {}, tensors.name[i]), facts(pairs), element("h3", {}, "Where it lies"), ...sharding(i, layout));
  if (data.statistics && data.statistics.histogram[i]) details.append(element("h3", {}, "Histogram"), histogram(data.statistics, i));
  details.hidden = false;
  details.parentElement.classList.remove("alone");
  details.scrollTop = 0;
  details.focus();
}

function close() {
  details.hidden = true;
  details.parentElement.classList.add("alone");
  const row = body.querySelector("tr[aria-current] button");
  shown.selected = null;
  markRow();
  (row || search).focus();
}

function histogram(statistics, i) {
  const counts = statistics.histogram[i];
  const most = Math.max(...counts, 1);
  const width = 400 / counts.length;
  const bars = counts.map((n, at) => {
    const height = n ? Math.max((90 * n) / most, 1) : 0;
    const bar = drawing("rect", { class: "bin", x: at * width, y: 100 - height, width: Math.max(width - 1, 1), height });
    bar.append(drawing("title", {}, figure(n)));
    return bar;
  });
  const [low, high] = statistics.range[i];
  const ends = element("div", { class: "dim", style: "display:flex;justify-content:space-between" }, element("span", {}, figure(low)), element("span", {}, figure(high)));
  return element("div", {}, drawing("svg", { viewBox: "0 0 400 102", role: "img", "aria-label": `Histogram from ${figure(low)} to ${figure(high)}` }, ...bars), ends);
}

const hue = (rank) => `hsl(${(rank * 137.5) % 360} 60% 62%)`;

function ranksText(ranks) {
  if (ranks.length <= 4) return ranks.join(", ");
  return `${ranks[0]}, ${ranks[1]} ... ${ranks[ranks.length - 1]} (${ranks.length})`;
}

/** Return a map of the boxes of a tensor: two dims of it, and a coordinate of the mesh to point at. */
function sharding(i, layout) {
  const shape = tensors.shape[i];
  if (!layout.boxes) return [element("p", { class: "dim" }, "Not drawn: this page holds no more boxes. See dtckpt inspect --layout.")];
  if (!shape.length) return [element("p", {}, `One element, on ranks ${ranksText(layout.boxes.flatMap((box) => box[0]))}.`)];
  const ndim = shape.length;
  const boxes = layout.boxes.map((box) => ({ starts: box.slice(0, ndim), sizes: box.slice(ndim, 2 * ndim), ranks: box[2 * ndim] }));
  const cuts = shape.map((_, dim) => new Set(boxes.map((box) => box.starts[dim])).size);
  const byCuts = [...shape.keys()].sort((a, b) => cuts[b] - cuts[a] || a - b);
  const state = { down: byCuts[0], across: byCuts[1], at: new Map(), rank: null };
  const [first, second] = [state.down, state.across].sort((a, b) => a - b);
  if (second !== undefined) { state.down = first; state.across = second; }
  const picture = drawing("svg", { viewBox: "0 0 420 300", role: "group", "aria-label": "Boxes of the tensor and the ranks that hold them" });
  const text = element("p", { role: "status", class: "dim" }, "");
  const selects = [], slices = new Map();
  const say = (box) => { text.textContent = `[${box.starts.map((start, dim) => `${start}:${start + box.sizes[dim]}`).join(", ")}] on rank ${ranksText(box.ranks)}${box.ranks.length > 1 ? ": copies" : ""}`; };
  const draw = () => {
    const across = state.across;
    const wide = across === undefined ? 1 : Math.max(shape[across], 1);
    const high = Math.max(shape[state.down], 1);
    const visible = boxes.filter((box) => [...state.at].every(([dim, index]) => box.starts[dim] <= index && index < box.starts[dim] + box.sizes[dim]));
    picture.replaceChildren(...visible.flatMap((box) => {
      const x = across === undefined ? 0 : (420 * box.starts[across]) / wide;
      const w = across === undefined ? 420 : (420 * box.sizes[across]) / wide;
      const y = (300 * box.starts[state.down]) / high;
      const h = (300 * box.sizes[state.down]) / high;
      const isHeld = state.rank !== null && box.ranks.includes(state.rank);
      const choose = () => { if (!box.ranks.includes(state.rank)) state.rank = box.ranks[0]; point(); say(box); draw(); };
      const rect = drawing("rect", { class: isHeld ? "box held" : "box", x, y, width: Math.max(w, 0.5), height: Math.max(h, 0.5), fill: hue(box.ranks[0]), click: choose });
      rect.append(drawing("title", {}, `rank ${ranksText(box.ranks)}`));
      const label = drawing("text", { x: x + 4, y: y + 14, fill: "#111111" }, ranksText(box.ranks));
      return w > 34 && h > 18 ? [rect, label] : [rect];
    }));
  };
  const controls = element("div", { class: "tools" });
  const choice = (label, options, call) => {
    const select = element("select", { change: () => { call(Number(select.value)); draw(); } }, ...options.map(([value, name]) => element("option", { value }, name)));
    controls.append(element("label", {}, `${label} `, select));
    return select;
  };
  const strides = layout.axes.map((_, at) => layout.axes.slice(at + 1).reduce((product, [, n]) => product * n, 1));
  /** Let the choices tell the coordinates of the rank that was chosen otherwise. */
  function point() {
    const index = layout.ranks ? layout.ranks.indexOf(state.rank) : state.rank;
    if (layout.axes.length) selects.forEach((select, at) => { select.value = Math.floor(index / strides[at]) % layout.axes[at][1]; });
    else for (const select of selects) select.value = state.rank;
  }
  const hold = (rank) => {
    state.rank = rank;
    const box = boxes.find((one) => one.ranks.includes(rank));
    if (box) { for (const [dim, select] of slices) { state.at.set(dim, box.starts[dim]); select.value = box.starts[dim]; } say(box); } else text.textContent = `rank ${rank} holds nothing of it`;
  };
  const numbered = (n) => [...Array(n).keys()].map((k) => [k, k]);
  if (layout.axes.length) {
    for (const [name, n] of layout.axes) selects.push(choice(name, numbered(n), () => {
      const index = selects.reduce((sum, select, at) => sum + Number(select.value) * strides[at], 0);
      hold(layout.ranks ? layout.ranks[index] : index);
    }));
  } else {
    const ranks = [...new Set(boxes.flatMap((box) => box.ranks))].sort((one, other) => one - other);
    selects.push(choice("rank", ranks.map((rank) => [rank, rank]), hold));
  }
  shape.forEach((_, dim) => {
    if (dim === state.down || dim === state.across || cuts[dim] < 2) return;
    state.at.set(dim, 0);
    const starts = [...new Set(boxes.map((box) => box.starts[dim]))].sort((a, b) => a - b);
    slices.set(dim, choice(`dim ${dim} from`, starts.map((start) => [start, start]), (start) => state.at.set(dim, start)));
  });
  hold(layout.axes.length ? (layout.ranks ? layout.ranks[0] : 0) : Number(selects[0].value));
  draw();
  const legend = `Down: dim ${state.down}${state.across === undefined ? "" : `; across: dim ${state.across}`}.`;
  return [controls, picture, element("p", { class: "dim" }, legend), text];
}

/** Return the modules of all tensors: names are cut at / and at dots. */
function moduleTree() {
  const root = { label: "all", bytes: 0, tensor: null, parent: null, pattern: "", children: new Map() };
  for (let i = 0; i < numTensors; i += 1) {
    const parts = tensors.name[i].split(/[/.]/);
    let node = root, end = -1;
    node.bytes += tensors.stored[i];
    parts.forEach((part, at) => {
      const isLeaf = at === parts.length - 1;
      end += part.length + 1;
      const key = isLeaf ? `${part}#${i}` : part;
      if (!node.children.has(key)) node.children.set(key, { label: part, bytes: 0, tensor: isLeaf ? i : null, parent: node, pattern: `${tensors.name[i].slice(0, end + 1)}*`, children: new Map() });
      node = node.children.get(key);
      node.bytes += tensors.stored[i];
    });
  }
  return root;
}

const BEHIND_WHITE = ["#1f6fb2", "#a8500a", "#1e7a34", "#8e3b9c", "#b02a37", "#0f766e", "#6b5b00", "#5b5bd6"]; // texts are white
const MOST_NODES = 250; // more are boxes too small to read

/** Return the treemap of a module: as many levels below it as there is room for. */
function treemap(module) {
  const nodes = [];
  const ids = [], labels = [], parents = [], values = [];
  const add = (node, label, parent, bytes) => {
    const id = String(nodes.length);
    nodes.push(node); ids.push(id); labels.push(plain(label)); parents.push(parent); values.push(bytes);
    return id;
  };
  let level = [{ node: module, id: add(module, module.label, "", module.bytes) }];
  while (level.length) { // by levels, so that modules that are alike are drawn alike
    const wide = level.filter(({ node }) => node.children.size);
    const room = Math.floor((MOST_NODES - nodes.length) / Math.max(wide.length, 1));
    const next = [];
    for (const { node, id } of wide) {
      const children = [...node.children.values()].sort((one, other) => other.bytes - one.bytes);
      const some = children.length <= room ? children : children.slice(0, Math.max(room - 1, 0));
      const bytes = some.reduce((sum, child) => sum + child.bytes, 0);
      if (node !== module && some.length < children.length && bytes < node.bytes / 2) continue; // a box "more" would tell less
      for (const child of some) {
        let inner = child, label = child.label;
        while (inner.children.size === 1) { inner = inner.children.values().next().value; label += `.${inner.label}`; }
        next.push({ node: inner, id: add(inner, label, id, child.bytes) });
      }
      if (some.length < children.length) add(null, `${figure(children.length - some.length)} more`, id, node.bytes - bytes);
    }
    level = next;
  }
  const trace = {
    type: "treemap", ids, labels, parents, values, branchvalues: "total", sort: true, pathbar: { visible: false }, tiling: { pad: 1 }, root: { color: "#4b5563" }, textfont: { color: "#ffffff" },
    text: values.map(size), textinfo: "label+text+percent root", hovertemplate: "%{label}<br>%{text}<extra></extra>", marker: { line: { width: 1 } },
  };
  return { nodes, trace };
}

const path = element("div", { class: "tools", role: "navigation", "aria-label": "Modules" });
const onward = (module) => (module.children.size === 1 ? onward(module.children.values().next().value) : module);
const everything = moduleTree();
const firstView = onward(everything).tensor === null ? onward(everything) : everything;
let viewed = treemap(firstView);
const modulesChart = !numTensors ? null : chart("Treemap of bytes by module", false, [viewed.trace], { margin: { l: 5, r: 5, t: 5, b: 5 }, uniformtext: { minsize: 9, mode: "hide" }, treemapcolorway: BEHIND_WHITE, extendtreemapcolors: false }, (place) => place.on("plotly_treemapclick", (event) => {
  const node = viewed.nodes[Number(event.points[0].id)];
  if (node && node.tensor !== null) {
    open(node.tensor);
  } else if (node) zoom(node === viewed.nodes[0] ? node.parent || node : node);
  return false;
}));

/** Show a module: its treemap, the way to it as buttons, and its tensors in the table. */
function zoom(module) {
  viewed = treemap(module);
  if (modulesChart.data) Plotly.react(modulesChart, [viewed.trace], modulesChart.layout);
  modulePath(module);
  path.querySelector("[aria-current]").focus({ preventScroll: true }); // the one that was pressed is gone
  search.value = module.pattern;
  find(search.value);
}

function modulePath(module) {
  const way = [];
  for (let node = module; node; node = node.parent) way.unshift(node);
  const children = [...module.children.values()].filter((child) => child.tensor === null);
  const into = element("select", { "aria-label": "A module below" }, ...children.map((child, at) => element("option", { value: at }, `${child.label} (${size(child.bytes)})`)));
  const go = element("button", { type: "button", click: () => zoom(children[Number(into.value)]) }, "Go into"); // arrows change what is chosen at once
  const steps = way.map((node) => element("button", { type: "button", class: "step", "aria-current": node === module && "true", click: () => zoom(node) }, node.label));
  path.replaceChildren(...steps, ...(children.length ? [into, go] : []));
}
modulePath(viewed.nodes[0]);

section("facts", "Checkpoint", facts(data.problem ? [["Damaged", element("span", { class: "bad" }, data.problem)], ...data.facts] : data.facts));

section("modules", "Bytes by module", ...(numTensors ? [path, modulesChart] : [element("p", { class: "dim" }, "No tensors.")]));

section("tensors", "Tensors",
  element("div", { class: "tools" }, search, told),
  element("div", { class: "split alone" },
    element("div", {}, element("div", { class: "scroll high" }, element("table", { id: "table" }, element("thead", {}, element("tr", {}, ...head)), body)), more),
    details));
rows();

const byDtype = data.dtypes.map((_, at) => tensors.stored.reduce((sum, bytes, i) => sum + (tensors.dtype[i] === at ? bytes : 0), 0));
const heldRanks = Object.keys(data.held).map(Number);
const bars = (label, x, y, title, names = x) => chart(label, true, [{ type: "bar", x, y, text: y.map((bytes, i) => `${plain(names[i])}: ${size(bytes)}`), textposition: "none", hovertemplate: "%{text}<extra></extra>" }], { xaxis: { title: { text: title }, type: x.length > 32 ? "linear" : "category" }, yaxis: byteAxis(y) });
function spread(values) {
  if (!values.length) return "";
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  return `${figure(values.length)} in all, ${size(Math.round(mean))} on average, the largest ${mean ? (most(values) / mean).toFixed(2) : 1} times that`;
}
const fileSizes = data.files.map((file) => file[2]);
section("balance", "Balance", element("div", { class: "pair" },
  numTensors ? element("div", {}, element("h3", {}, "Bytes by dtype"), element("p", { class: "dim" }, data.dtypes.map((name, i) => `${name} ${size(byDtype[i])}`).join(", ")), bars("Bytes by dtype", data.dtypes, byDtype, "")) : null,
  heldRanks.length ? element("div", {}, element("h3", {}, "Bytes that ranks held"), element("p", { class: "dim" }, spread(Object.values(data.held))), bars("Bytes that ranks held", heldRanks, Object.values(data.held), "rank")) : null,
  element("div", {}, element("h3", {}, "Bytes of files"), ...(fileSizes.length ? [element("p", { class: "dim" }, spread(fileSizes)), bars("Bytes of files", data.files.map((_, i) => i), fileSizes, "file", data.files.map((file) => file[0]))] : [element("p", { class: "dim" }, "No files.")]))));

if (data.timing) {
  const { phases, ranks, seconds } = data.timing;
  section("timing", "Timing", element("p", { class: "dim" }, "Seconds of each phase of the save, by rank."),
    chart("Seconds of phases by rank", true, [{ type: "heatmap", x: ranks, y: phases.map(plain), z: seconds, colorscale: "Viridis", zmin: 0, hovertemplate: "rank %{x}, %{y}: %{z:.4f} s<extra></extra>", colorbar: { title: { text: "s" } } }], { xaxis: { title: { text: "rank" }, type: ranks.length > 32 ? "linear" : "category" }, yaxis: { autorange: "reversed", type: "category" } }),
    asTable([{ title: "Rank", right: true }, ...phases.map((phase) => ({ title: phase, right: true }))], ranks.map((rank, at) => [figure(rank), ...seconds.map((row) => figure(row[at]))])));
}

if (data.comparison) {
  const { url, summary, rows: differences, hidden } = data.comparison;
  const numberOf = new Map(tensors.name.map((name, i) => [name, i]));
  const named = (name) => (numberOf.has(name) ? element("button", { type: "button", click: () => open(numberOf.get(name)) }, name) : name);
  section("comparison", "Comparison", element("p", {}, `With ${url}: ${summary}`),
    differences.length ? element("p", { class: "dim" }, "Drift is the length of the difference over the length here, of values that are finite in both. NaN, Inf counts values that are so in one alone.") : null,
    differences.length ? table([{ title: "Tensor", wide: true }, { title: "What", wide: true }, { title: "NaN, Inf", right: true }, { title: "Drift", right: true }, { title: "Max abs", right: true }, { title: "Cosine", right: true }],
      differences.map(([name, what, odd, ...numbers]) => [named(name), what, odd ? element("span", { class: "bad" }, figure(odd)) : figure(odd), ...numbers.map(figure)])) : null,
    hidden ? element("p", { class: "dim" }, `${figure(hidden)} more are not shown; see dtckpt diff`) : null);
}

section("values", "Values and files",
  data.values.length ? table([{ title: "Value", wide: true }, { title: "", wide: true }], data.values) : element("p", { class: "dim" }, "No values but tensors."),
  data.more_values ? element("p", { class: "dim" }, `${figure(data.more_values)} more values; see dtckpt cat`) : null,
  element("details", {}, element("summary", {}, counted(data.files.length, "file")), table([{ title: "File", wide: true }, { title: "Rank", right: true }, { title: "Bytes", right: true }], data.files.slice(0, 2000).map(([path, rank, bytes]) => [path, String(rank), size(bytes)]))));

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !isTyping) { event.preventDefault(); search.focus(); return; }
  if (event.key === "Escape" && !details.hidden) { close(); return; }
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  const buttons = [...body.querySelectorAll("button")];
  const at = buttons.indexOf(event.target);
  if (at < 0 && event.target !== search) return;
  event.preventDefault();
  const next = at + (event.key === "ArrowDown" ? 1 : -1);
  (next < 0 ? search : buttons[Math.min(next, buttons.length - 1)])?.focus();
});
document.documentElement.dataset.ready = "true";
