"""How the report looks, in light and dark, and what it does under the pointer."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #667085; --page: #ffffff; --grid: #e4e7ec;
  --a: #0b6e99; --b: #b45309; --c: #7a3e9d; --d: #3f7d20; --limit: #b3261e;
  --m0: #0b6e9910; --m1: #b4530918; --m2: #7a3e9d18; --tip: #fffffff2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --faint: #98a2b3; --page: #14181f; --grid: #2b323d;
    --a: #5ab8e0; --b: #f0a04b; --c: #c792ea; --d: #9ad17b; --limit: #ff8a80;
    --m0: #5ab8e014; --m1: #f0a04b1c; --m2: #c792ea1c; --tip: #1f2530f2; } }
body { margin: 1.5rem; background: var(--page); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 0 0 .4rem; }
h3 { font-size: .85rem; margin: .8rem 0 .1rem; } h3 span, .faint { color: var(--faint); font-weight: normal; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child { text-align: left; } thead th { color: var(--faint); font-weight: 600; }
.columns { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(26rem, 44rem); gap: 1.5rem;
  overflow-x: auto; padding-bottom: 1rem; }
svg.chart { width: 100%; height: auto; display: block; }
svg.chart:focus-visible { outline: 1px solid var(--a); }
.tick { font-size: 10px; fill: var(--faint); } .grid { stroke: var(--grid); }
text.mode { font-size: 9px; fill: var(--faint); }
rect.mode0 { fill: var(--m0); } rect.mode1 { fill: var(--m1); } rect.mode2 { fill: var(--m2); }
.line { fill: none; stroke-width: 1.4; stroke-linejoin: round; } .area { stroke: none; opacity: .16; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); } .line.c { stroke: var(--c); }
.line.d { stroke: var(--d); }
.line.b { stroke-dasharray: 5 2; } .line.c { stroke-dasharray: 2 2; } .line.d { stroke-dasharray: 7 2 2 2; }
.area.a { fill: var(--a); } .area.b { fill: var(--b); }
.area.c { fill: var(--c); } .area.d { fill: var(--d); }
.limit { stroke: var(--limit); stroke-dasharray: 8 3; } .cursor { stroke: var(--faint); visibility: hidden; }
.on .cursor { visibility: visible; } .mark path { fill: var(--ink); opacity: .55; }
.mark:hover path, .mark:focus path { fill: var(--limit); opacity: 1; } .mark:focus { outline: none; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0; padding: 0;
  font-size: .75rem; color: var(--faint); }
.legend svg { width: 22px; height: 8px; vertical-align: middle; margin-right: .3rem; }
#tip { position: fixed; pointer-events: none; background: var(--tip); border: 1px solid var(--grid);
  border-radius: 4px; padding: .35rem .6rem; font-size: .75rem; white-space: pre-wrap; max-width: 34rem;
  visibility: hidden; } #tip.on { visibility: visible; }
"""

# One instant for all charts: the pointer, or the arrow keys on a chart that has the focus.
SCRIPT = """
const said = JSON.parse(document.getElementById("values").textContent);
const charts = [...document.querySelectorAll("svg.chart")];
const tip = document.getElementById("tip");
const [LEFT, RIGHT, WIDTH] = said.frame;
const clock = t => [Math.floor(t / 3600), Math.floor(t / 60) % 60, Math.floor(t) % 60]
  .map((n, i) => i ? String(n).padStart(2, "0") : n).join(":");
function place(x, y) {
  tip.style.left = Math.max(0, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(0, Math.min(y + 14, innerHeight - tip.offsetHeight - 8)) + "px";
}
function show(text, x, y) { tip.textContent = text; tip.classList.add("on"); place(x, y); }
function hide() { tip.classList.remove("on"); charts.forEach(c => c.classList.remove("on")); }
function point(chart, t, x, y) {
  charts.forEach(other => {
    const at = LEFT + (WIDTH - LEFT - RIGHT) * t / Number(other.dataset.until);
    const line = other.querySelector(".cursor");
    line.setAttribute("x1", at); line.setAttribute("x2", at); other.classList.add("on");
  });
  const lines = said.charts[chart.id].map(line => {
    const value = line.values[Math.min(line.values.length - 1, Math.floor(t / line.width))];
    return line.name + "  " + (value === null ? "-" : value);
  });
  show([clock(t), ...lines].join("\\n"), x, y);
}
charts.forEach(chart => {
  const until = Number(chart.dataset.until);
  let t = 0;
  chart.addEventListener("pointermove", event => {
    const mark = event.target.closest(".mark");
    if (mark) { show(mark.getAttribute("aria-label"), event.clientX, event.clientY); return; }
    const box = chart.getBoundingClientRect();
    const at = (event.clientX - box.left) * WIDTH / box.width;
    t = Math.max(0, Math.min(until, until * (at - LEFT) / (WIDTH - LEFT - RIGHT)));
    point(chart, t, event.clientX, event.clientY);
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", event => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) { return; }
    event.preventDefault();
    t = Math.max(0, Math.min(until, t + way * until / 120));
    const box = chart.getBoundingClientRect();
    point(chart, t, box.left + box.width / 2, box.top);
  });
  // Without this script the browser shows a title by itself; with it that would be told twice.
  chart.querySelectorAll("title").forEach(title => {
    title.parentNode.setAttribute("aria-label", title.textContent);
    title.remove();
  });
  chart.querySelectorAll(".mark").forEach(mark => {
    mark.addEventListener("focus", () => {
      const box = mark.getBoundingClientRect();
      show(mark.getAttribute("aria-label"), box.left, box.bottom);
    });
    mark.addEventListener("blur", hide);
  });
});
"""
