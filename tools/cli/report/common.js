"use strict";
/* What the pages of checkpoints and of runs share: elements, numbers, the theme, charts. */

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const charts = [];

/** Return an element; attributes that are functions listen to events. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Return a number with one digit, halves to even ones: so that sizes are those that the command tells. */
function rounded(number) {
  const tenths = Math.round(10 * number);
  return (tenths % 2 && tenths - 10 * number === 0.5 ? tenths - 1 : tenths) / 10;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while ((unit ? rounded(bytes) : bytes) >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit ? rounded(bytes).toFixed(1) : bytes} ${units[unit]}`;
}

/** Return a number as text; those that JavaScript does not have exactly, or JSON not at all, are texts. */
function figure(number) {
  if (number === null || number === undefined) return "";
  if (typeof number === "string") return /^-?\d+$/.test(number) ? BigInt(number).toLocaleString("en") : number;
  if (Number.isInteger(number) && Math.abs(number) < 1e15) return number.toLocaleString("en");
  return Number(number.toPrecision(5)).toString();
}

/** Return what to sort and draw a number of the document by; null if it is none. */
function numeric(number) {
  const value = typeof number === "string" ? Number(number.replace("inf", "Infinity")) : number;
  return value === undefined || Number.isNaN(value) ? null : value;
}

const counted = (number, noun) => `${figure(number)} ${noun}${number === 1 ? "" : "s"}`;

const most = (values) => values.reduce((one, other) => Math.max(one, other), 0);

/** Return a name so that Plotly, which takes texts for HTML, shows it as it is. */
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** Return an axis of bytes, with ticks at few powers of two and their multiples. */
function byteAxis(values) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(most(values), 4) / 4));
  const ticks = [0, 1, 2, 3, 4].map((n) => n * step);
  return { tickvals: ticks, ticktext: ticks.map(size), rangemode: "tozero" };
}

/** Append a section with a heading to the page, and a link to it. */
function section(id, title, ...children) {
  const made = element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), ...children);
  main.append(made);
  document.getElementById("nav").append(element("a", { href: `#${id}` }, title));
  return made;
}

function facts(pairs) {
  return element("dl", {}, ...pairs.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]));
}

/** Return a place for a chart, which is drawn once the page is there. */
function chart(label, low, traces, layout = {}, then = null) {
  const place = element("div", { class: low ? "chart low" : "chart", role: "img", "aria-label": label });
  charts.push({ place, traces, layout, then });
  return place;
}

/** Return the numbers of a chart for those who do not see it: a table that opens. */
function asTable(columns, rows) {
  return element("details", {}, element("summary", {}, "As a table"), table(columns, rows));
}

/** Return a table; columns are {title, right}, rows are lists of texts or elements. */
function table(columns, rows) {
  const head = element("tr", {}, ...columns.map((column) => element("th", { class: column.right && "right", scope: "col" }, column.title)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, i) => element("td", { class: columns[i].right ? "right" : columns[i].wide && "wide" }, cell))));
  return element("div", { class: "scroll", tabindex: 0 }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  return { text: style.getPropertyValue("--text").trim(), line: style.getPropertyValue("--line").trim() };
}

function themed(layout) {
  const { text, line } = colours();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text }, margin: { l: 60, r: 20, t: 20, b: 50 },
    ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
  };
}

/** Draw all charts, each when the browser has time for it; called once the library is there. */
function drawCharts() {
  const later = window.requestIdleCallback || ((call) => setTimeout(call, 0));
  const next = () => {
    const one = charts.find((chart) => !chart.isDrawn);
    if (!one) { document.documentElement.dataset.drawn = "true"; return; }
    one.isDrawn = true;
    Plotly.newPlot(one.place, one.traces, themed(one.layout), { responsive: true, displaylogo: false, displayModeBar: false });
    if (one.then) one.then(one.place);
    later(next);
  };
  later(next);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const one of charts) if (one.isDrawn) Plotly.relayout(one.place, themed(one.layout));
}

document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
