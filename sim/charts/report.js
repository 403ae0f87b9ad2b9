// One instant for all charts: the pointer, a finger, or the arrow keys on a chart that has the focus.
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
  ].join("\n"), left, top);
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
