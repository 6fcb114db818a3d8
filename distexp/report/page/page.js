"use strict";
// Script of the page: passes the data to DataTables and Vega, and compares two configurations.
const NUMBER_FORMATS = new Map();

function formatNumber(value, digits) {
  if (!NUMBER_FORMATS.has(digits)) {
    // "negative" writes no sign for values that round to zero.
    const options = { minimumFractionDigits: digits, maximumFractionDigits: digits, signDisplay: "negative" };
    NUMBER_FORMATS.set(digits, new Intl.NumberFormat("en-US", options));
  }
  return NUMBER_FORMATS.get(digits).format(value);
}

function element(name, text, attributes = {}) {
  const created = document.createElement(name);
  if (text !== undefined) created.textContent = text;
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, value);
  return created;
}

// Decompress the text of a script element.
async function decompress(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function importLibrary(id) {
  const address = URL.createObjectURL(new Blob([await decompress(id)], { type: "text/javascript" }));
  const module = await import(address);
  URL.revokeObjectURL(address);
  return module;
}

// ---- the table of runs ----

function statusCell([status, reason]) {
  return element("span", status, { class: `status ${status}`, ...(reason ? { title: reason } : {}) });
}

function filesCell([folder, ...names]) {
  const cell = element("span", undefined, { class: "files" });
  if (folder === undefined) return cell;
  const titles = { "record.json": "record", "metrics.jsonl": "metrics" };
  cell.append(element("a", "folder", { href: `${folder}/` }));
  for (const name of names) {
    const isFolder = !name.includes(".");
    cell.append(" ", element("a", titles[name] ?? name, { href: `${folder}/${name}${isFolder ? "/" : ""}` }));
  }
  return cell;
}

// Sorting and filtering use the raw value: a number, a text, or a status with its reason.
const RENDER = {
  // DataTables reads a text as HTML, an element not.
  text: () => (value, kind) => (kind === "display" ? element("span", value ?? "–") : value ?? ""),
  number: ({ digits, marks, texts }) => (value, kind, _row, { row }) => {
    if (kind !== "display") return value;
    if (texts?.[row]) return texts[row]; // a ratio that may not be ranked
    return value === null ? "–" : formatNumber(value, digits) + (marks?.[row] ?? "");
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
  const { default: DataTable, set_or_remove_dark_class: followTheme } = await importLibrary("table-library");
  followTheme();
  // Missing values come last in both directions.
  const compare = (way) => (a, b) => (a === null) - (b === null) || way * (a - b);
  DataTable.type("num", "order", { asc: compare(1), desc: compare(-1) });
  // DataTables adds the filters as a second row to an existing header.
  const heads = element("tr");
  heads.append(...columns.map((column) => element("th", column.title)));
  const body = document.getElementById("runs-table");
  body.parentElement.replaceWith(body);
  body.replaceChildren();
  body.createTHead().append(heads);
  const table = new DataTable("#runs-table", {
    data: rows,
    columns: columns.map(columnOf),
    deferRender: true,
    createdRow: (row, cells) => (row.id = `run-${cells[0]}`),
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
  for (const icon of drawn.querySelectorAll("thead svg")) icon.setAttribute("aria-hidden", "true");
  for (const head of drawn.querySelectorAll("thead th")) head.scope = "col";
  for (const filter of drawn.querySelectorAll("thead input"))
    filter.setAttribute("aria-label", `filter ${columns[filter.closest("th, td").cellIndex].title}`);
  drawn.replaceWith(box);
  box.append(drawn);
  // Print all rows, not one page of them.
  let shown = table.page.len();
  window.addEventListener("beforeprint", () => {
    shown = table.page.len();
    if (rows.length <= 200) table.page.len(-1).draw(false);
  });
  window.addEventListener("afterprint", () => table.page.len(shown).draw(false));
  // A mark of a chart links to the row of its run, which may be on another page of the table.
  const showRow = () => {
    const [name, label] = decodeURIComponent(location.hash).split(/-(.*)/);
    const found = name === "#run" ? rows.findIndex((cells) => String(cells[0]) === label) : -1;
    if (found < 0) return;
    const position = () => table.rows({ order: "applied", search: "applied" }).indexes().indexOf(found);
    if (position() < 0) table.search("").columns().search("");
    if (position() < 0) table.draw();
    table.page(Math.floor(position() / table.page.len())).draw(false);
    const row = document.getElementById(`run-${label}`);
    for (const other of document.querySelectorAll("#runs-table tr.target")) other.classList.remove("target");
    row.classList.add("target");
    row.scrollIntoView({ block: "center" });
  };
  window.addEventListener("hashchange", showRow);
  showRow();
}

// ---- the charts ----

const PRINT_WIDTH = { single: 640, column: 270 }; // pixels of a chart on paper, alone or in two columns

async function drawCharts(charts) {
  if (Object.keys(charts).length === 0) return;
  const { default: vegaEmbed } = await importLibrary("chart-library");
  const drawn = [];
  for (const place of document.querySelectorAll("[data-chart]")) {
    const options = { actions: false, renderer: "svg", tooltip: { theme: "custom" } };
    place.replaceChildren();
    const { view } = await vegaEmbed(place, charts[place.dataset.chart], options);
    drawn.push([place, view]);
  }
  // Redraw for paper: a shrunk chart would have tiny labels.
  window.addEventListener("beforeprint", () => {
    for (const [place, view] of drawn) view.width(place.closest(".many:not(.wide-panels)") ? PRINT_WIDTH.column : PRINT_WIDTH.single).run();
  });
  window.addEventListener("afterprint", () => window.dispatchEvent(new Event("resize")));
}

// ---- the text of a mark ----

function showTexts() {
  const tip = element("div", undefined, { id: "tip", role: "status", hidden: "" });
  document.body.append(tip);
  document.addEventListener("mouseover", ({ target, pageX, pageY }) => {
    const title = target.querySelector?.(":scope > title");
    if (title && target.closest(".chart")) {
      target.setAttribute("aria-label", title.textContent);
      title.remove(); // or the browser would show it, too
    }
    const text = target.closest?.(".chart") ? target.getAttribute("aria-label") : null;
    tip.hidden = !text || target.tagName === "DIV" || target.tagName === "g";
    if (tip.hidden) return;
    tip.textContent = text;
    tip.style.left = `${Math.max(8, Math.min(pageX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${pageY + 14}px`;
  });
}

// ---- comparison of two runs ----

function setUpComparison({ shared, differing, runs, opened }) {
  const names = runs.map(([label, choices]) => (choices ? `${label} · ${choices}` : label));
  const inputs = ["run-a", "run-b"].map((id) => document.getElementById(id));
  const position = ({ value }) => {
    const exact = names.indexOf(value);
    return exact >= 0 ? exact : runs.findIndex(([label]) => label === value.trim());
  };
  const show = () => {
    const [a, b] = inputs.map(position);
    const keys = a < 0 || b < 0 ? [] : Object.entries(differing).filter(([, { indices }]) => indices[a] !== indices[b]);
    showDifference(keys.map(([key, { values, indices }]) => [key, values[indices[a]], values[indices[b]]]));
    const all = Object.keys(shared).length + Object.keys(differing).length;
    document.getElementById("difference-note").textContent =
      a < 0 || b < 0 ? "Choose two runs, or type their numbers."
      : keys.length ? `${keys.length} of ${all} keys differ.`
      : `All ${all} keys are equal.`;
  };
  document.getElementById("run-names").append(...names.map((text) => element("option", undefined, { value: text })));
  inputs.forEach((input, index) => {
    input.value = names[opened[index]];
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

async function fillPage() {
  const { configurations, runs, charts } = JSON.parse(await decompress("data"));
  if (document.getElementById("difference")) setUpComparison(configurations);
  showTexts();
  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
  await Promise.all([drawRuns(runs), drawCharts(charts)]);
  document.documentElement.dataset.ready = "yes";
}

// Older browsers have no DecompressionStream.
fillPage().catch((error) => {
  const text = `This browser cannot sort the table and compare runs (${error}). All columns are in results.csv.`;
  document.querySelector("#runs-table").before(element("p", text, { class: "note" }));
  throw error;
});
