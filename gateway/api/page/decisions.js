// Decisions: counts and modes under the load that caused them; each decision opens to its reasons.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { h, patch } from "./dom.js";
import { explain } from "./explain.js";
import { clock, count, perSecond, plural, seconds, share } from "./format.js";
import { History, RANGES } from "./history.js";

const POLICIES = ["predictive", "target_tracking", "panic_window", "token_saturation", "static"];
const LISTED = 50;

export function decisions(main, page) {
  const [, wanted, at] = location.hash.split("/");
  if (wanted) page.model = decodeURIComponent(wanted);
  let range = RANGES.find((each) => each.label === sessionStorage.getItem("tidegate.range")) ?? RANGES[0];
  let history = new History(page.model, range);
  let slo = {};
  let opened = at ? Number(at) : null;
  let following = !at;
  let shown = 0;

  const source = () => history;
  const pick = (instant) => open(instant);
  const charts = [
    new Chart({
      title: "Load", note: "requests per second", group: "decisions", source, pick, format: perSecond,
      series: [
        { label: "arrivals", column: "arrivals_per_s", color: "c1" },
        { label: "rejected", column: "refused_per_s", color: "c5" },
        { label: "capacity within SLO", column: "capacity_per_s", color: "c3", stepped: true },
        { label: "forecast", column: "forecast_per_s", color: "c4", dashed: true, hidden: true },
      ],
    }),
    new Chart({
      title: "Replicas", note: "bands are modes", group: "decisions", source, pick, format: count, whole: true, named: true,
      series: [
        { label: "target", column: "target", color: "c1", stepped: true },
        { label: "ready", column: "ready", color: "c3", stepped: true },
        { label: "of other modes", column: "leaving", color: "c2", stepped: true },
        { label: "shadow policy", column: "shadow", color: "c4", stepped: true, dashed: true },
        ...POLICIES.map((name, i) => ({ label: name, column: name, color: `c${(i % 6) + 1}`, stepped: true, dashed: true, hidden: true })),
        { label: "GPUs", column: "gpus", color: "c6", stepped: true, hidden: true },
      ],
    }),
    new Chart({
      title: "TTFT p95", note: "time to first token", group: "decisions", source, pick, format: seconds, limit: () => slo.ttft_p95_s ?? null,
      series: [{ label: "p95", column: "ttft_p95_s", color: "c1" }, { label: "p50", column: "ttft_p50_s", color: "c6" }],
    }),
    new Chart({
      title: "ITL p95", note: "inter-token latency", group: "decisions", source, pick, format: seconds, limit: () => slo.itl_p95_s ?? null,
      series: [{ label: "p95", column: "itl_p95_s", color: "c1" }, { label: "p50", column: "itl_p50_s", color: "c6" }],
    }),
    new Chart({
      title: "Within the SLO", note: "share of the requests of the last minute", group: "decisions", source, pick, format: share, limit: () => slo.attainment ?? null,
      series: [{ label: "within", column: "met", color: "c3" }, { label: "KV cache used", column: "kv_used", color: "c4", hidden: true }],
    }),
    new Chart({
      title: "Queue", note: "requests that wait for a replica", group: "decisions", source, pick, format: count, whole: true,
      series: [{ label: "queued", column: "queued", color: "c2" }, { label: "in the gateway", column: "concurrency", color: "c6" }],
    }),
  ];
  const list = h("ol", { class: "changes" });
  const latest = h("button", { type: "button", onclick: () => open(null) }, "Latest decision");
  const detail = h("section", { class: "card detail", "aria-label": "The opened decision", tabindex: "-1" });
  const ranges = h("div", { class: "segments", role: "group", "aria-label": "Range" });
  main.append(h("h2", { class: "sr" }, "Decisions"), h("div", { class: "row wrap" }, ranges, h("p", { class: "muted grow" }, "Click a chart, or choose a change, to open the decision of that time."), latest),
    h("div", { class: "charts" }, charts.map((each) => each.node)),
    h("div", { class: "columns wide" }, h("section", { class: "card", "aria-label": "Changes" }, h("h3", null, "Changes"), list), detail));

  function setRanges() {
    patch(ranges, RANGES.map((each) => h("button", { key: each.label, type: "button", "aria-pressed": String(each === range), onclick: () => {
      range = each;
      sessionStorage.setItem("tidegate.range", each.label);
      history = new History(page.model, range);
      setRanges();
      refresh();
    } }, each.label)));
  }

  /** Open the decision in force at `instant`, or with null the latest, and then each new one. */
  async function open(instant) {
    following = instant === null;
    opened = instant;
    const query = new URLSearchParams({ model: page.model, last: 1, ...(following ? {} : { at: instant }) });
    const [found] = await get(`admin/decisions?${query}`);
    if (opened !== instant) return;
    if (!found) return patch(detail, h("p", { class: "muted" }, following ? "No decision is known yet." : `No decision before ${clock(instant)} is in the log.`));
    shown = found.decision.at;
    patch(detail, explain(found, following));
    latest.setAttribute("aria-pressed", String(following));
    listChanges();
  }

  function listChanges() {
    const last = history.changes.slice(-LISTED).reverse();
    patch(list, last.length ? last.map((each) => h("li", { key: String(each.at) },
      h("button", { type: "button", class: "change", "aria-current": Math.abs(each.at - shown) < 0.001 ? "true" : null, onclick: async () => {
        await open(each.at);
        detail.focus();
      } },
      h("time", null, clock(each.at)),
      h("b", null, each.mode === each.was_mode ? `${each.mode}: ${each.was_count} to ${plural(each.count, "replica")}` : `${each.was_mode} x ${each.was_count} to ${each.mode} x ${each.count}`),
      each.dry_run ? h("span", { class: "badge" }, "dry run") : null,
      h("span", { class: "muted" }, each.reason)))) : h("li", { class: "muted" }, "Nothing changed in this range."));
  }

  async function refresh() {
    if (page.state && !page.controlled) main.replaceChildren(h("p", { class: "card" }, "Tidegate does not deploy these servers, so it makes no decisions on them."));
    if (!page.controlled) return;
    if (history.model !== page.model) history = new History(page.model, range);
    const mine = history;
    try {
      if (!(await mine.refresh(page.state?.controller?.at ?? Date.now() / 1000)) || mine !== history) return;
    } catch (error) {
      return page.problem(error.message);
    }
    for (const each of charts) each.update();
    listChanges();
    if (following) await open(null);
  }

  setRanges();
  if (opened && page.controlled) open(opened);
  refresh();
  return {
    update(state) {
      slo = state.controller?.models.find((each) => each.status.name === page.model)?.slo ?? {};
      refresh();
    },
    restyle: () => charts.forEach((each) => each.plot && each.build()),
    close: () => charts.forEach((each) => each.close()),
  };
}
