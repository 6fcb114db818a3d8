"use strict";
// The page's own script: it hands the data to DataTables and Vega, and compares two configurations.
const data = JSON.parse(document.getElementById("data").textContent);
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

// A module that stands in the page, packed by gzip.
async function library(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  const source = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const text = await new Response(source).text();
  const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
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

async function drawRuns() {
  const { default: DataTable, set_or_remove_dark_class: followTheme } = await library("table-library");
  followTheme();
  // What was not measured stands last, whichever way a column is sorted.
  const compare = (way) => (a, b) => (a === null) - (b === null) || way * (a - b);
  DataTable.type("num", "order", { asc: compare(1), desc: compare(-1) });
  const { columns, rows } = data.runs;
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

async function drawCharts() {
  const { default: vegaEmbed } = await library("chart-library");
  const drawn = [];
  for (const place of document.querySelectorAll("[data-chart]")) {
    const options = { actions: false, renderer: "svg", tooltip: { theme: "custom" } };
    const { view } = await vegaEmbed(place, data.charts[place.dataset.chart], options);
    drawn.push([place, view]);
  }
  // What is drawn for a screen would be shrunk on paper, its letters with it.
  window.addEventListener("beforeprint", () => {
    for (const [place, view] of drawn) view.width(place.closest(".many") ? PAPER.beside : PAPER.alone).run();
  });
  window.addEventListener("afterprint", () => window.dispatchEvent(new Event("resize")));
}

// ---- the difference of two runs ----

const { shared, differing, runs } = data.configurations;
const said = runs.map(([label, choices]) => (choices ? `${label} · ${choices}` : label));

function position(text) {
  const exact = said.indexOf(text);
  return exact >= 0 ? exact : runs.findIndex(([label]) => label === text.trim());
}

function showDifference() {
  const [a, b] = ["run-a", "run-b"].map((id) => position(document.getElementById(id).value));
  const table = document.getElementById("difference-table");
  const note = document.getElementById("difference-note");
  const body = table.tBodies[0];
  body.replaceChildren();
  table.hidden = true;
  if (a < 0 || b < 0) {
    note.textContent = "Choose two runs by their names, or type their numbers.";
    return;
  }
  for (const [key, { values, of }] of Object.entries(differing)) {
    if (of[a] === of[b]) continue;
    const row = element("tr");
    row.append(element("th", key, { scope: "row" }), element("td", values[of[a]]), element("td", values[of[b]]));
    body.append(row);
  }
  const count = body.rows.length;
  const all = Object.keys(shared).length + Object.keys(differing).length;
  table.hidden = count === 0;
  note.textContent = count ? `${count} of ${all} keys differ.` : `All ${all} keys are equal.`;
}

function offerRuns() {
  const list = document.getElementById("run-names");
  list.append(...said.map((text) => element("option", undefined, { value: text })));
  ["run-a", "run-b"].forEach((id, index) => {
    const input = document.getElementById(id);
    input.value = said[Math.min(index, said.length - 1)] ?? "";
    input.addEventListener("input", showDifference);
    input.addEventListener("focus", () => input.select());
  });
  showDifference();
}

// ---- light and dark ----

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

offerRuns();
Promise.all([drawRuns(), drawCharts()]).then(() => {
  document.documentElement.dataset.ready = "yes";
});
