// Requests: the last routing decisions, the candidates' predicted seconds, and what was measured.

import { h, patch } from "./dom.js";
import { clock, count, plural, seconds, shortId, tokens } from "./format.js";

const PARTS = [["wait_s", "queue and batch", "c1"], ["prefill_s", "prefill", "c3"], ["adapter_s", "adapter load", "c4"], ["pressure_s", "KV pressure", "c2"], ["burden_s", "cost to others", "c6"]];

export function requests(main, page) {
  let paused = false;
  let kept = [];
  const pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Resume" : "Pause";
  } }, "Pause");
  const body = h("div", null);
  main.append(h("section", { class: "card", "aria-label": "Last routes" },
    h("div", { class: "row wrap" }, h("h2", null, "Last routes"), h("p", { class: "muted grow" }, "The newest first. Predicted and measured are the time to the first token; only streams are measured."), pause),
    h("p", { class: "legend" }, PARTS.map(([, label, color]) => h("span", null, h("span", { class: "swatch", style: { "--c": `var(--${color})` } }), label))),
    body));
  return {
    update(state) {
      if (paused) return;
      kept = (state.controller?.routes ?? state.routes ?? []).filter((each) => !page.model || each.model === page.model);
      patch(body, kept.length ? h("ol", { class: "routes" }, kept.slice(0, 40).map(route)) : h("p", { class: "muted" }, "No request was routed yet, or its worker has not reported. Send one in the playground."));
    },
  };
}

export function route(each) {
  const chosen = each.candidates.find((candidate) => candidate.replica === each.replica);
  const error = each.ttft_s === null || !chosen ? null : chosen.total_s - each.ttft_s;
  const wide = Math.max(0.001, ...each.candidates.map((candidate) => candidate.total_s + candidate.burden_s));
  return h("li", { key: `${each.at}-${each.replica}-${each.prompt_tokens}` }, h("details", { class: "route" },
    h("summary", null,
      h("time", null, clock(each.at)),
      h("span", { class: "to" }, `to ${shortId(each.replica)}`),
      h("span", null, `predicted ${seconds(chosen?.total_s)}`),
      h("span", null, each.ttft_s === null ? "not measured" : `measured ${seconds(each.ttft_s)}`),
      h("span", { class: `muted ${error !== null && Math.abs(error) > Math.max(0.5 * each.ttft_s, 0.05) ? "off" : ""}` }, error === null ? "" : `${seconds(Math.abs(error))} ${error > 0 ? "less" : "more"} than predicted`),
      h("span", { class: "muted" }, `${tokens(each.prompt_tokens)} prompt tokens, ${tokens(chosen?.cached_tokens ?? 0)} cached`),
      each.adapter ? h("span", { class: "chip" }, each.adapter.split("@")[0]) : null,
      each.tenant ? h("span", { class: "muted" }, `tenant ${each.tenant}`) : null),
    h("p", { class: "muted" }, `${plural(each.candidates.length, "candidate")}; ${each.reason}.`),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Candidates at ${clock(each.at)}, ${count(each.prompt_tokens)} prompt tokens` }, h("table", null,
      h("thead", null, h("tr", null, ["Replica", "Predicted", "Parts", "Uncached tokens"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, [...each.candidates].sort((a, b) => a.total_s + a.burden_s - b.total_s - b.burden_s).map((candidate) => h("tr", { key: candidate.replica, class: candidate.replica === each.replica ? "chosen" : "" },
        h("th", { scope: "row" }, shortId(candidate.replica), candidate.replica === each.replica ? h("span", { class: "badge good" }, "chosen") : null),
        h("td", null, seconds(candidate.total_s)),
        h("td", null, h("span", { class: "stack", role: "img", "aria-label": PARTS.map(([name, label]) => `${label} ${seconds(candidate[name])}`).join(", ") },
          PARTS.map(([name, label, color]) => h("i", { title: `${label} ${seconds(candidate[name])}`, style: { width: `${(Math.max(0, candidate[name]) / wide) * 100}%`, "--c": `var(--${color})` } })))),
        h("td", null, count(candidate.uncached_tokens)))))))));
}
