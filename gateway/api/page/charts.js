// Charts over time (uPlot): lines with a legend of buttons, a shared cursor, and marks of decisions.

import { h, patch } from "./dom.js";

// Loaded before this module.
const { uPlot } = window;

const HEIGHT = 170;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The mode of each row as coloured bands, and a line at each change. */
function background(source, named) {
  return (chart) => {
    const { ctx, bbox } = chart;
    const { at, mode, changes } = source();
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const names = [...new Set(mode)].sort();
    for (let i = 0; i < at.length;) {
      let end = i;
      while (end + 1 < at.length && mode[end + 1] === mode[i]) end += 1;
      const left = chart.valToPos(at[i], "x", true);
      const right = chart.valToPos(at[end + 1] ?? at[end], "x", true);
      if (names.indexOf(mode[i]) % 2) {
        ctx.fillStyle = color("band");
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
      }
      ctx.font = `${11 * devicePixelRatio}px system-ui`;
      if (named && right - left > ctx.measureText(mode[i]).width + 8 * devicePixelRatio) {
        ctx.fillStyle = color("muted");
        ctx.textAlign = "left";
        ctx.fillText(mode[i], left + 4 * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
      }
      i = end + 1;
    }
    ctx.strokeStyle = color("mark");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const change of changes) {
      const x = Math.round(chart.valToPos(change.at, "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };
}

/**
 * A chart. `series` are {label, column, color, stepped, dashed, hidden}; `format` gives a figure its unit;
 * `limit` is a horizontal line, `source` returns the history; `pick` gets the instant that was clicked; with
 * `whole` the figures are whole numbers; with `named` the bands have the names of the modes.
 */
export class Chart {
  constructor({ title, note, series, format, source, limit, pick, group, whole, named }) {
    Object.assign(this, { title, series, format, source, limit, pick, group, whole, named });
    this.legend = h("div", { class: "legend", role: "group", "aria-label": `Lines of ${title}` });
    this.canvas = h("div", { class: "canvas", role: "img", "aria-label": title });
    this.node = h("figure", { class: "chart card" },
      h("figcaption", null, h("h3", null, title), note ? h("p", { class: "muted" }, note) : null),
      this.canvas, this.legend);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
  }

  build() {
    this.plot?.destroy();
    const axis = { stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const step = uPlot.paths.stepped({ align: 1 });
    const hidden = new Set(this.series.filter((each) => each.hidden).map((each) => each.label));
    this.plot = new uPlot({
      width: Math.max(this.canvas.clientWidth, 200),
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: this.group }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high || 0, this.limit?.() ?? 0) * 1.2 || 1] } },
      axes: [
        { ...axis, size: 30, values: (_, splits) => splits.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: this.short() ? "2-digit" : undefined })), space: 70 },
        { ...axis, size: 62, incrs: this.whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] : undefined, values: (_, splits) => splits.map((value) => this.format(value)) },
      ],
      series: [{}, ...this.series.map((each) => ({
        label: each.label,
        stroke: color(each.color),
        width: 2,
        dash: each.dashed ? [6, 4] : undefined,
        paths: each.stepped ? step : undefined,
        points: { show: false },
        spanGaps: false,
        show: !hidden.has(each.label),
      }))],
      hooks: { drawClear: [background(this.source, this.named)], draw: [(chart) => this.drawLimit(chart)], setCursor: [() => this.relabel()] },
    }, this.data(), this.canvas);
    this.plot.over.onclick = () => {
      const at = this.plot.posToVal(this.plot.cursor.left, "x");
      if (Number.isFinite(at)) this.pick?.(at);
    };
    this.relabel();
  }

  short() {
    const { at } = this.source();
    return at.length > 0 && at[at.length - 1] - at[0] < 300;
  }

  data() {
    const { at, columns } = this.source();
    return [at, ...this.series.map((each) => columns[each.column] ?? at.map(() => null))];
  }

  drawLimit(chart) {
    const limit = this.limit?.();
    if (limit === undefined || limit === null) return;
    const { ctx, bbox } = chart;
    const y = Math.round(chart.valToPos(limit, "y", true));
    ctx.save();
    ctx.strokeStyle = color("bad");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([8 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }

  resize() {
    if (this.plot && this.canvas.clientWidth > 0) this.plot.setSize({ width: this.canvas.clientWidth, height: HEIGHT });
  }

  update() {
    if (!this.source().at.length) {
      if (!this.plot) patch(this.canvas, h("p", { class: "muted empty" }, "No decision is known yet."));
      return;
    }
    if (!this.plot) {
      this.canvas.replaceChildren();
      this.build();
    } else this.plot.setData(this.data());
    this.relabel();
  }

  /** The legend: a button for each line, with its figure under the cursor, or else the last one. */
  relabel() {
    const plot = this.plot;
    if (!plot) return;
    const at = plot.cursor.idx ?? plot.data[0].length - 1;
    const figures = this.series.filter((_, i) => plot.series[i + 1].show).map((each) => `${each.label} ${this.format(plot.data[this.series.indexOf(each) + 1][at])}`);
    this.canvas.setAttribute("aria-label", `${this.title}: ${figures.join(", ")}`);
    patch(this.legend, this.series.map((each, i) => plot.data[i + 1].every((value) => value === null) ? null : h("button", {
      key: each.label, type: "button", "aria-pressed": String(plot.series[i + 1].show),
      onclick: () => {
        each.hidden = plot.series[i + 1].show;
        plot.setSeries(i + 1, { show: !plot.series[i + 1].show });
        this.relabel();
      },
    },
    h("span", { class: each.dashed ? "swatch dashed" : "swatch", style: { "--c": `var(--${each.color})` } }),
    each.label, " ", h("b", null, this.format(plot.data[i + 1][at])))),
    this.limit?.() ? h("span", { class: "goal" }, h("span", { class: "swatch dashed", style: { "--c": "var(--bad)" } }), "SLO ", h("b", null, this.format(this.limit()))) : null);
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}
