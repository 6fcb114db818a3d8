"use strict";
// The page's own script: it hands the data to DataTables and Vega, and compares two configurations.
const DIGITS = new Map();

function number(value, digits) {
  if (!DIGITS.has(digits)) {
    const exactly = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    DIGITS.set(digits, new Intl.NumberFormat("en-US", exactly));
  }
  return DIGITS.get(digits).format(value);
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// A text that stands in the page, packed by gzip.
async function unpacked(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  const source = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(source).text();
}

async function library(id) {
  const address = URL.createObjectURL(new Blob([await unpacked(id)], { type: "text/javascript" }));
  const module = await import(address);
  URL.revokeObjectURL(address);
  return module;
}

// ---- the table of runs ----

function statusCell([status, why]) {
  return element("span", status, { class: `status ${status}`, ...(why ? { title: why } : {}) });
}

function filesCell([folder, ...names]) {
  const cell = element("span", undefined, { class: "files" });
  if (folder === undefined) return cell;
  const said = { "record.json": "record", "metrics.jsonl": "metrics" };
  cell.append(element("a", "folder", { href: `${folder}/` }));
  for (const name of names) {
    const isFolder = !name.includes(".");
    cell.append(" ", element("a", said[name] ?? name, { href: `${folder}/${name}${isFolder ? "/" : ""}` }));
  }
  return cell;
}

// Sorting and filtering see what is read: a number, a status with its reason, or a text.
const RENDER = {
  text: () => (value, kind) => value ?? (kind === "display" ? "–" : ""),
  number: ({ digits }) => (value, kind) => {
    if (kind !== "display") return value;
    return value === null ? "–" : number(value, digits);
  },
  "setting-number": () => (value, kind) => (value === null && kind === "display" ? "–" : value),
  status: () => (value, kind) => (kind === "display" ? statusCell(value) : kind === "filter" ? value.join(" ") : value[0]),
  files: () => (value, kind) => (kind === "display" ? filesCell(value) : ""),
};

function columnOf(column) {
  const numeric = column.kind.endsWith("number");
  return {
    render: RENDER[column.kind](column),
    type: numeric ? "num" : "string",
    className: numeric ? "dt-right" : "dt-left",
    orderable: column.kind !== "files",
    searchable: column.kind !== "files",
    ...(column.kind === "files" ? { columnControl: { target: 1, content: [] } } : {}),
  };
}

async function drawRuns({ columns, rows }) {
  const { default: DataTable, set_or_remove_dark_class: followTheme } = await library("table-library");
  followTheme();
  // What was not measured stands last, whichever way a column is sorted.
  const compare = (way) => (a, b) => (a === null) - (b === null) || way * (a - b);
  DataTable.type("num", "order", { asc: compare(1), desc: compare(-1) });
  // The filters go into a second row of a header, which therefore has to be there before.
  const heads = element("tr");
  heads.append(...columns.map((column) => element("th", column.title)));
  document.getElementById("runs-table").createTHead().append(heads);
  const table = new DataTable("#runs-table", {
    data: rows,
    columns: columns.map(columnOf),
    deferRender: true,
    autoWidth: false,
    order: [],
    columnControl: { target: 1, content: ["search"] },
    pageLength: 25,
    lengthMenu: [10, 25, 100, { label: "all", value: -1 }],
    ordering: { indicators: true, handler: true },
    layout: { topStart: "search", topEnd: "pageLength", bottomStart: "info", bottomEnd: "paging" },
    language: { search: "", searchPlaceholder: "Search all columns", lengthMenu: "_MENU_ rows", emptyTable: "no runs" },
  });
  const box = element("div", undefined, { class: "scroll" });
  const drawn = table.table().node();
  drawn.replaceWith(box);
  box.append(drawn);
  // Paper has no second page to turn to.
  let shown = table.page.len();
  window.addEventListener("beforeprint", () => {
    shown = table.page.len();
    if (rows.length <= 200) table.page.len(-1).draw(false);
  });
  window.addEventListener("afterprint", () => table.page.len(shown).draw(false));
}

// ---- the charts ----

const PAPER = { alone: 640, beside: 270 }; // pixels that a chart has on paper, by itself or in two columns

async function drawCharts(charts) {
  const { default: vegaEmbed } = await library("chart-library");
  const drawn = [];
  for (const place of document.querySelectorAll("[data-chart]")) {
    const options = { actions: false, renderer: "svg", tooltip: { theme: "custom" } };
    const { view } = await vegaEmbed(place, charts[place.dataset.chart], options);
    drawn.push([place, view]);
  }
  // What is drawn for a screen would be shrunk on paper, its letters with it.
  window.addEventListener("beforeprint", () => {
    for (const [place, view] of drawn) view.width(place.closest(".many") ? PAPER.beside : PAPER.alone).run();
  });
  window.addEventListener("afterprint", () => window.dispatchEvent(new Event("resize")));
}

// ---- the difference of two runs ----

function offerRuns({ shared, differing, runs }) {
  const said = runs.map(([label, choices]) => (choices ? `${label} · ${choices}` : label));
  const inputs = ["run-a", "run-b"].map((id) => document.getElementById(id));
  const position = ({ value }) => {
    const exact = said.indexOf(value);
    return exact >= 0 ? exact : runs.findIndex(([label]) => label === value.trim());
  };
  const show = () => {
    const [a, b] = inputs.map(position);
    const keys = a < 0 || b < 0 ? [] : Object.entries(differing).filter(([, { of }]) => of[a] !== of[b]);
    showDifference(keys.map(([key, { values, of }]) => [key, values[of[a]], values[of[b]]]));
    const all = Object.keys(shared).length + Object.keys(differing).length;
    document.getElementById("difference-note").textContent =
      a < 0 || b < 0 ? "Choose two runs by their names, or type their numbers."
      : keys.length ? `${keys.length} of ${all} keys differ.`
      : `All ${all} keys are equal.`;
  };
  document.getElementById("run-names").append(...said.map((text) => element("option", undefined, { value: text })));
  inputs.forEach((input, index) => {
    input.value = said[Math.min(index, said.length - 1)] ?? "";
    input.addEventListener("input", show);
    input.addEventListener("focus", () => input.select());
  });
  show();
}

function showDifference(lines) {
  const table = document.getElementById("difference-table");
  table.hidden = lines.length === 0;
  const rows = lines.map(([key, ...values]) => {
    const row = element("tr");
    row.append(element("th", key, { scope: "row" }), ...values.map((value) => element("td", value)));
    return row;
  });
  table.tBodies[0].replaceChildren(...rows);
}

// ---- light and dark ----

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

async function fill() {
  const { configurations, runs, charts } = JSON.parse(await unpacked("data"));
  offerRuns(configurations);
  await Promise.all([drawRuns(runs), drawCharts(charts)]);
  document.documentElement.dataset.ready = "yes";
}

// Older browsers cannot unpack.
fill().catch((error) => {
  const where = "The charts are also in the folder plots, the table in results.md.";
  const said = element("p", `This browser cannot show the table and the charts (${error}). ${where}`, { class: "card" });
  document.querySelector(".tiles").before(said);
  throw error;
});
