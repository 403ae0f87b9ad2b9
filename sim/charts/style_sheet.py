"""The style sheet of the report, in light and dark, and the script that shows values at the pointer."""

from __future__ import annotations

# Letters of a chart grow with it, so they are larger in small columns.
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #667085; --page: #ffffff; --grid: #e4e7ec;
  --a: #0b6e99; --b: #b45309; --c: #7a3e9d; --d: #3f7d20; --limit: #b3261e;
  --m0: #0b6e9924; --m1: #b4530930; --m2: #7a3e9d2c; --m3: #3f7d202c; --tip: #fffffffa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --faint: #98a2b3; --page: #14181f; --grid: #2b323d;
    --a: #5ab8e0; --b: #f0a04b; --c: #c792ea; --d: #9ad17b; --limit: #ff8a80;
    --m0: #5ab8e02c; --m1: #f0a04b38; --m2: #c792ea34; --m3: #9ad17b30; --tip: #1f2530fa; } }
body { margin: 1.5rem; background: var(--page); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 0 0 .4rem; }
h3 { font-size: .85rem; margin: .8rem 0 .1rem; } h3 span, .faint { color: var(--faint); font-weight: normal; }
h1, h2 { overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--grid); }
td, tbody th { white-space: nowrap; } thead th { color: var(--faint); font-weight: 600; }
thead th { max-width: 11rem; overflow-wrap: break-word; vertical-align: bottom; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
.columns { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(min(26rem, 100%), 44rem);
  gap: 1.5rem; overflow-x: auto; padding-bottom: 1rem; }
section { container-type: inline-size; }
svg.chart { width: 100%; height: auto; display: block; }
svg.chart:focus-visible { outline: 1px solid var(--a); }
svg.chart text { font-size: 10px; }
@container (max-width: 600px) { svg.chart text { font-size: 12px; } }
@container (max-width: 470px) { svg.chart text { font-size: 14px; } }
@media (max-width: 600px) { body { margin: 1rem; } }
rect.mode0 { fill: var(--m0); } rect.mode1 { fill: var(--m1); } rect.mode2 { fill: var(--m2); }
rect.mode3 { fill: var(--m3); }
.line { fill: none; stroke-width: 1.4; stroke-linejoin: round; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); } .line.c { stroke: var(--c); }
.line.d { stroke: var(--d); }
.line.b { stroke-dasharray: 5 2; } .line.c { stroke-dasharray: 2 2; } .line.d { stroke-dasharray: 7 2 2 2; }
.limit { stroke: var(--limit); stroke-dasharray: 8 3; } .cursor { stroke: var(--faint); visibility: hidden; }
.on .cursor { visibility: visible; } .mark { opacity: .55; } .mark:hover, .mark.near { opacity: 1; }
.mark:hover path, .mark.near path { fill: var(--limit) !important; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 .8rem; margin: 0; padding: 0;
  font-size: .75rem; color: var(--faint); }
.legend svg { width: 22px; height: 8px; vertical-align: middle; margin-right: .3rem; }
.legend b { display: inline-block; min-width: 2.6rem; margin-left: .3rem; color: var(--ink);
  font-variant-numeric: tabular-nums; }
#tip { position: fixed; left: 0; top: 0; box-sizing: border-box; width: max-content;
  max-width: min(34rem, calc(100vw - 1rem)); pointer-events: none; background: var(--tip);
  border: 1px solid var(--faint); border-radius: 4px; padding: .35rem .6rem; font-size: .75rem;
  white-space: pre-wrap; overflow-wrap: anywhere; visibility: hidden; } #tip.on { visibility: visible; }
"""

# One instant for all charts: the pointer, a finger, or the arrow keys on a chart that has the focus.
SCRIPT = """
const data = JSON.parse(document.getElementById("values").textContent);
const charts = [...document.querySelectorAll("svg.chart")];
const tip = document.getElementById("tip");
const [LEFT, RIGHT, WIDTH] = data.frame;
const NEAR = 7;
let shown = null;
const clock = t => [Math.floor(t / 3600), Math.floor(t / 60) % 60, Math.floor(t) % 60]
  .map((n, i) => i ? String(n).padStart(2, "0") : n).join(":");
const value = (line, t) => line.values[Math.min(line.values.length - 1, Math.floor(t / line.width))];
const until = chart => Number(chart.dataset.until);
const x = (chart, t) => LEFT + (WIDTH - LEFT - RIGHT) * t / until(chart);
const marks = chart => [...chart.querySelectorAll(".mark")];
const at = mark => Number(mark.dataset.at);
// Beside the instant, and on its other side where there is no room.
function show(text, left, top) {
  tip.textContent = text;
  tip.classList.add("on");
  const across = left + 14 + tip.offsetWidth > innerWidth - 8 ? left - 14 - tip.offsetWidth : left + 14;
  const down = top + 14 + tip.offsetHeight > innerHeight - 8 ? top - 14 - tip.offsetHeight : top + 14;
  tip.style.left = Math.max(8, Math.min(across, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(8, down) + "px";
}
function hide() {
  tip.classList.remove("on");
  charts.forEach(chart => {
    chart.classList.remove("on");
    chart.nextElementSibling.querySelectorAll("b").forEach(cell => { cell.textContent = ""; });
  });
  document.querySelectorAll(".near").forEach(mark => mark.classList.remove("near"));
}
function point(chart, t, left, top) {
  shown = chart;
  charts.forEach(other => {
    const line = other.querySelector(".cursor");
    line.setAttribute("x1", x(other, t)); line.setAttribute("x2", x(other, t)); other.classList.add("on");
    const cells = other.nextElementSibling.querySelectorAll("b");
    data.charts[other.id].lines.forEach((each, i) => { cells[i].textContent = value(each, t) ?? "-"; });
  });
  const { unit, lines, stays } = data.charts[chart.id];
  const stay = stays.filter(([start]) => t >= start).pop();
  const rows = lines.map(each => each.name + "  " + (value(each, t) ?? "-") + (unit ? " " + unit : ""));
  const off = mark => Math.abs(x(chart, at(mark)) - x(chart, t));
  const near = marks(chart).filter(mark => NEAR >= off(mark)).sort((a, b) => off(a) - off(b))[0];
  document.querySelectorAll(".near").forEach(mark => mark.classList.remove("near"));
  if (near) { near.classList.add("near"); }
  show([
    clock(t) + "  " + chart.closest("section").getAttribute("aria-label"),
    ...(stay ? ["mode  " + stay[1]] : []), ...rows, ...(near ? ["", near.getAttribute("aria-label")] : []),
  ].join("\\n"), left, top);
}
charts.forEach(chart => {
  let t = 0;
  function follow(event) {
    const box = chart.getBoundingClientRect();
    const part = ((event.clientX - box.left) * WIDTH / box.width - LEFT) / (WIDTH - LEFT - RIGHT);
    t = until(chart) * Math.max(0, Math.min(1, part));
    point(chart, t, event.clientX, event.clientY);
  }
  chart.addEventListener("pointermove", follow);
  chart.addEventListener("pointerdown", follow);
  // What a finger has shown stays until it touches something else.
  chart.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") { hide(); } });
  chart.addEventListener("blur", () => { if (shown === chart) { hide(); } });
  chart.addEventListener("keydown", event => {
    if (event.key === "Escape") { hide(); return; }
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) { return; }
    event.preventDefault();
    const next = marks(chart).map(at).filter(each => way * (each - t) > 0).sort((a, b) => way * (a - b))[0];
    t = event.shiftKey ? next ?? t : Math.max(0, Math.min(until(chart), t + way * until(chart) / 120));
    const box = chart.getBoundingClientRect();
    point(chart, t, box.left + x(chart, t) * box.width / WIDTH, box.bottom - 14);
  });
  // Without this script the browser shows a title by itself; with it the text would be shown twice.
  chart.querySelectorAll("title").forEach(title => {
    title.parentNode.setAttribute("aria-label", title.textContent);
    title.remove();
  });
});
document.addEventListener("pointerdown", event => { if (!event.target.closest("svg.chart")) { hide(); } });
"""
