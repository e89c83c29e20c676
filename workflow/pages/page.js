"use strict";
// Pictures open at full size, tables sort by a click on a head, charts are drawn in the colours of the page.

const larger = document.createElement("dialog");
larger.addEventListener("click", () => larger.close());
document.body.append(larger);
for (const picture of document.querySelectorAll("img.larger")) {
  picture.tabIndex = 0;
  const open = () => {
    larger.replaceChildren(Object.assign(new Image(), { src: picture.src, alt: picture.alt }));
    larger.showModal();
  };
  picture.addEventListener("click", open);
  picture.addEventListener("keydown", (event) => event.key === "Enter" && open());
}

// The value that a cell sorts by, null if it has none: a number where data-sort is set, else its text.
function value(cell) {
  const text = cell.dataset.sort ?? cell.textContent;
  if (text === "" || cell.dataset.sort === undefined) return text || null;
  return Number.isNaN(Number(text)) ? null : Number(text);
}
function compareValues(a, b) {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a < b ? -1 : a > b ? 1 : 0;
}
for (const head of document.querySelectorAll("table.sortable th button")) {
  head.addEventListener("click", () => {
    const th = head.parentElement, table = th.closest("table"), column = th.cellIndex;
    const down = th.getAttribute("aria-sort") === "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    const keys = new Map(rows.map((row) => [row, value(row.cells[column])]));
    rows.sort((a, b) => {
      const [one, two] = [keys.get(a), keys.get(b)];
      return (one === null) - (two === null) || compareValues(one, two) * (down ? -1 : 1);
    });
    table.tBodies[0].append(...rows);
  });
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const drawn = new Set();
function draw(place) {
  const { x, y } = JSON.parse(place.querySelector("script").textContent);
  const plot = Bokeh.Plotting.figure({
    tools: "pan,box_zoom,wheel_zoom,reset,save,hover", sizing_mode: "stretch_both",
    background_fill_color: null, border_fill_color: null, outline_line_color: null,
  });
  plot.toolbar.autohide = true;
  plot.toolbar.logo = null;
  for (const side of [...plot.xaxis, ...plot.yaxis]) {
    for (const part of ["axis_line", "major_tick_line", "minor_tick_line"]) side[`${part}_color`] = colour("--line");
    side.major_label_text_color = colour("--quiet");
  }
  for (const grid of [...plot.xgrid, ...plot.ygrid]) grid.grid_line_color = colour("--line");
  const hover = plot.toolbar.tools.find((tool) => tool.type === "HoverTool");
  hover.tooltips = [["step", "@x{0,0}"], ["value", "@y{%0.6g}"]];
  hover.formatters = { "@y": "printf" };
  hover.mode = "vline";
  const known = y.map((value) => (value === null ? NaN : value));
  plot.line(x, known, { line_color: colour("--link"), line_width: 1.5 });
  if (x.length < 40) plot.scatter(x, known, { size: 5, color: colour("--link") });
  const box = place.querySelector("div");
  box.replaceChildren();
  Bokeh.Plotting.show(plot, box);
  drawn.add(place);
}
const charts = [...document.querySelectorAll("figure.chart")];
if (charts.length) {
  const near = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) if (isIntersecting && !drawn.has(target)) draw(target);
  }, { rootMargin: "600px" });
  charts.forEach((place) => near.observe(place));
  addEventListener("beforeprint", () => charts.forEach((place) => drawn.has(place) || draw(place)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
}

const filter = document.getElementById("filter");
if (filter) {
  filter.addEventListener("input", () => {
    for (const row of document.querySelectorAll("#experiments tbody tr, .gallery article")) {
      row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase());
    }
  });
}

const order = document.getElementById("order");
if (order) {
  const gallery = document.querySelector(".gallery");
  order.addEventListener("change", () => {
    const key = (card) => card.dataset[order.value];
    const cards = [...gallery.children];
    const apart = (a, b) => (order.value === "name" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    cards.sort((a, b) => !key(a) - !key(b) || apart(key(a), key(b)));
    gallery.append(...cards);
  });
}

const sides = ["left", "right"].map((id) => document.getElementById(id));
if (sides[0]) {
  const measured = JSON.parse(document.getElementById("measured").textContent);
  const grids = new Map([...document.querySelectorAll("img[data-of]")].map((img) => [img.dataset.of, img]));
  const pictures = ["under", "over"].map((id) => document.getElementById(id));
  const places = () => {
    const [left, right] = pictures.map((picture) => `${picture.naturalWidth} x ${picture.naturalHeight}`);
    const [one, two] = sides.map((side) => grids.get(side.value).dataset.drawing);
    const differ = left !== right ? `The pictures differ in size, ${left} and ${right} pixels`
      : one !== two ? "The samples were drawn with other seeds or labels" : "";
    document.getElementById("places").textContent = differ
      ? `${differ}: places do not correspond.` : "Images at the same place have the same seed.";
  };
  pictures.forEach((picture) => picture.addEventListener("load", places));
  const compare = () => {
    const names = sides.map((side) => side.value);
    names.forEach((name, i) => {
      pictures[i].src = grids.get(name).src;
      document.getElementById(`${sides[i].id}-name`).textContent = name;
    });
    const shared = Object.keys(measured[names[0]]).filter((metric) => metric in measured[names[1]]);
    document.getElementById("unmeasured").hidden = shared.length > 0;
    document.getElementById("both").replaceChildren(...shared.map((metric) => {
      const row = document.createElement("tr");
      for (const text of [metric, ...names.map((name) => measured[name][metric])]) row.insertCell().textContent = text;
      return row;
    }));
  };
  for (const side of sides) {
    side.append(...[...grids.keys()].map((name) => new Option(name)));
    side.addEventListener("change", compare);
  }
  sides[1].selectedIndex = 1;
  const slider = document.getElementById("slider");
  slider.addEventListener("input", () => pictures[1].style.setProperty("--at", `${slider.value}%`));
  compare();
}
