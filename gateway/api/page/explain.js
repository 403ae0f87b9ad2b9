// One decision, as `tidegate explain` says it: its metrics, what each policy proposed, and what limited it.

import { h } from "./dom.js";
import { clock, count, duration, number, perSecond, plural, seconds, share } from "./format.js";

export function explain({ situation, decision, outcome }, newest) {
  const change = decision.mode !== decision.was_mode ? `${decision.was_mode} x ${decision.was_count} to ${decision.mode} x ${decision.count}`
    : decision.count !== decision.was_count ? `${decision.mode}: ${decision.was_count} to ${plural(decision.count, "replica")}`
      : `${decision.mode}: keeps ${plural(decision.count, "replica")}`;
  return [
    h("div", { class: "row wrap" }, h("h3", null, change), newest ? h("span", { class: "badge good" }, "latest") : null, decision.dry_run ? h("span", { class: "badge warn" }, "dry run: not applied") : null,
      h("time", { class: "muted" }, clock(decision.at))),
    h("p", { class: "because" }, decision.reason),
    h("dl", { class: "facts" }, facts(situation, decision, outcome)),
    proposals(situation, decision),
    modes(decision),
  ];
}

function fact(name, ...lines) {
  return [h("dt", { key: `t-${name}` }, name), h("dd", { key: `d-${name}` }, lines.flat().filter(Boolean).map((line) => h("p", null, line)))];
}

function facts(situation, decision, outcome) {
  const { signals, slo, supply } = situation;
  const demand = signals.demand;
  const rows = [];
  if (situation.override) rows.push(fact("Override", `by hand: ${situation.override.mode}${situation.override.count === null ? "" : ` x ${situation.override.count}`}`));
  if (demand) {
    rows.push(fact("Demand",
      `${perSecond(demand.arrivals.last_20_s)} arrivals over 20 s, ${perSecond(demand.arrivals.last_60_s)} over 60 s; ${perSecond(demand.refused.last_20_s)} rejected; ${number(demand.concurrency.last_20_s)} concurrent requests`,
      `${count(demand.queued)} queued${demand.queued ? `, the oldest for ${seconds(demand.oldest_s)}` : ""}; the oldest report is ${seconds(demand.age_s)} old`));
    if (demand.ttft || demand.itl) rows.push(fact("Latency", limited("TTFT", demand.ttft, slo.ttft_p95_s), limited("ITL", demand.itl, slo.itl_p95_s),
      `${share(demand.met.both)} of requests within the SLO (target ${share(slo.attainment)})`));
    if (demand.input_tokens) rows.push(fact("Requests", `mean ${count(demand.input_tokens)} input tokens (${share(demand.hit)} cached), ${count(demand.output_tokens)} output tokens`));
  } else rows.push(fact("Demand", "no gateway has reported yet"));
  const starts = supply.starting_s.length ? `; ${plural(supply.starting_s.length, "replica")} starting, ready in ${supply.starting_s.map((each) => duration(each)).join(", ")}` : "";
  rows.push(fact("Supply", `${count(supply.serving)} of ${plural(supply.wanted, "desired replica")} ready${starts}${supply.draining ? `; ${supply.draining} draining` : ""}${supply.failures ? `; ${supply.failures} failed starts in a row` : ""}`));
  if (signals.replicas.length) {
    const used = signals.replicas.map((each) => each.kv_used);
    const sum = (name) => signals.replicas.reduce((total, each) => total + each[name], 0);
    rows.push(fact("Replicas", `KV cache ${share(Math.min(...used))} to ${share(Math.max(...used))} used; ${count(sum("running"))} running, ${count(sum("waiting"))} waiting`));
  }
  const { capability } = decision;
  rows.push(fact("Capacity", `${perSecond(capability.mu)} per replica within the SLO, at most ${perSecond(capability.mu_max)} without; performance model ${capability.version ? `version ${capability.version}, error ${share(capability.error)}` : "as shipped, not calibrated"}`));
  rows.push(fact("Policy", `${plural(decision.proposal.count, "replica")}: ${decision.proposal.reason}`,
    Object.keys(decision.proposal.terms).length ? `terms, in replicas: ${Object.entries(decision.proposal.terms).map(([name, value]) => `${name} ${number(value, 2)}`).join(", ")}` : null,
    decision.proposal.forecast === null ? null : `forecast ${perSecond(decision.proposal.forecast)}, upper bound ${perSecond(decision.proposal.forecast_high)}, for when a replica started now is ready`));
  rows.push(fact("Limits", decision.applied_guardrails.length ? decision.applied_guardrails.map((each) => h("span", null, h("b", null, each.rule), ` ${each.was} to ${each.now}: ${each.why}`)) : "none applied"));
  if (decision.short) rows.push(fact("Unserved", `${perSecond(decision.short)} ${situation.spillover ? "go to fallback providers" : "exceed the capacity"}`));
  if (outcome) rows.push(fact("Outcome", `predicted gain ${share(outcome.promised)}, measured ${share(outcome.measured)}; ${share(outcome.met_before)} of requests within the SLO before, ${share(outcome.met)} since`));
  return rows;
}

function limited(name, quantiles, limit) {
  if (!quantiles) return null;
  const against = limit === null ? "no SLO" : `SLO ${seconds(limit)}${quantiles.p95 > limit ? ", missed" : ", met"}`;
  return `${name} p95 ${seconds(quantiles.p95)}, p50 ${seconds(quantiles.p50)} (${against})`;
}

/** What each policy proposed for the same situation. */
function proposals(situation, decision) {
  const rows = [["live policy", decision.proposal.count, decision.proposal.reason]];
  if (decision.shadow) rows.push(["shadow policy", decision.shadow.count, decision.shadow.reason]);
  for (const [name, wanted] of Object.entries(decision.others).sort()) rows.push([name, wanted, "compared only"]);
  const most = Math.max(1, decision.count, ...rows.map((row) => row[1]));
  return [h("h4", null, `What each policy proposed for ${decision.was_mode}`), table("Proposals", ["Policy", "Replicas", "Why"], rows.map(([name, wanted, why]) => h("tr", { key: name },
    h("th", { scope: "row" }, name), h("td", { class: "amount" }, h("span", null, count(wanted)), h("i", { style: { width: `${(wanted / most) * 100}%` } })), h("td", null, why))))];
}

function modes(decision) {
  if (decision.mode_forecasts.length < 2) return null;
  return [h("h4", null, "Modes"), table("Modes", ["Mode", "Replicas", "Cost", "Within SLO", "TTFT p95", "ITL p95", "Note"], decision.mode_forecasts.map((each) => h("tr", { key: each.mode, class: each.mode === decision.mode ? "chosen" : "" },
    h("th", { scope: "row" }, each.mode), h("td", null, count(each.count)), h("td", null, number(each.cost, 2)), h("td", null, share(each.met)),
    h("td", null, each.ttft_s === null ? "cannot keep up" : seconds(each.ttft_s)), h("td", null, each.itl_s === null ? "cannot keep up" : seconds(each.itl_s)),
    h("td", null, each.why, each.switch ? `. A switch takes ${duration(each.switch.lasts_s)}, with ${duration(each.switch.gap_s)} without a serving replica.` : "")))),
  h("p", { class: "small muted" }, "Cost has no unit: only ratios count. Latencies are predicted.")];
}

export function table(name, columns, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, h("table", null,
    h("thead", null, h("tr", null, columns.map((each) => h("th", { scope: "col" }, each)))), h("tbody", null, rows)));
}
