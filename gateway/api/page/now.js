// Now: each model against its SLO, the fleet as replicas, and what waits.

import { post } from "./api.js";
import { h, patch } from "./dom.js";
import { clock, count, duration, number, perSecond, plural, seconds, share, shortId, tokens } from "./format.js";

const PRIORITIES = ["critical", "standard", "sheddable", "batch"];
const MANY = 120;

export function now(main, page) {
  return {
    update(state) {
      const controller = state.controller;
      const models = controller?.models ?? [];
      patch(main,
        h("h2", { class: "sr" }, "Now"),
        models.map((model) => modelCard(model, controller.replicas, page)),
        fleet(state),
        controller ? h("div", { class: "columns" }, queue(controller), events(controller)) : null);
    },
  };
}

function tile(name, figure, detail, state = "") {
  return h("div", { key: name, class: `tile ${state}` }, h("dt", null, name), h("dd", null, h("b", null, figure), detail ? h("span", null, detail) : null));
}

/** A latency against its limit, in words and not by colour alone. */
function latency(name, quantiles, limit) {
  if (!quantiles) return tile(name, "–", limit ? `SLO ${seconds(limit)} at p95` : "no stream in the last minute");
  const state = limit ? (quantiles.p95 > limit ? "bad" : "good") : "";
  const verdict = limit ? (quantiles.p95 > limit ? `above the SLO of ${seconds(limit)}` : `within the SLO of ${seconds(limit)}`) : "no SLO";
  return tile(name, seconds(quantiles.p95), `p50 ${seconds(quantiles.p50)}; ${verdict}`, state);
}

function verdict(model) {
  const { signals, slo, status } = model;
  const demand = signals?.demand;
  if (status.override) return ["warn", "manual override"];
  if (!demand) return ["", "no metrics yet"];
  if (!demand.queued && !demand.arrivals.last_60_s && !demand.concurrency.last_20_s) return ["", "idle"];
  if (slo.ttft_p95_s === null && slo.itl_p95_s === null) return ["", "no SLO set"];
  const measured = (demand.ttft && slo.ttft_p95_s !== null) || (demand.itl && slo.itl_p95_s !== null);
  if (!measured) return ["", "SLO not measured yet"];
  const late = (demand.ttft && slo.ttft_p95_s !== null && demand.ttft.p95 > slo.ttft_p95_s)
    || (demand.itl && slo.itl_p95_s !== null && demand.itl.p95 > slo.itl_p95_s) || demand.met.both < slo.attainment;
  return late ? ["bad", "SLO missed"] : ["good", "SLO met"];
}

function modelCard(model, replicas, page) {
  const inState = (state) => replicas.filter((each) => each.model === model.status.name && each.state === state).length;
  const { status, signals, slo } = model;
  const demand = signals?.demand;
  const [state, text] = verdict(model);
  const judged = slo && (slo.ttft_p95_s !== null || slo.itl_p95_s !== null);
  const met = judged && (demand?.ttft || demand?.itl) ? demand.met.both : null;
  const goodput = met === null ? null : Math.max(0, demand.arrivals.last_60_s - demand.refused.last_60_s) * met;
  const capacity = status.capability && status.ready ? status.capability.mu * status.ready : null;
  return h("section", { class: "card", key: `model-${status.name}`, "aria-label": `Model ${status.name}` },
    h("div", { class: "row" },
      h("h3", null, status.name), h("span", { class: `badge ${state}` }, text),
      h("span", { class: "badge" }, `mode ${status.mode}`),
      h("span", { class: "badge" }, status.phase),
      h("span", { class: "muted grow" }, `scaled by ${status.decided_by}${status.dry_run ? ", dry run" : ""}`)),
    h("dl", { class: "tiles" },
      tile("Replicas ready", `${count(status.ready)} of ${count(status.target)}`,
        `${count(inState("starting"))} starting, ${count(inState("draining"))} draining`, status.ready < status.target ? "warn" : ""),
      latency("TTFT p95", demand?.ttft, slo?.ttft_p95_s),
      latency("ITL p95", demand?.itl, slo?.itl_p95_s),
      tile("Goodput", perSecond(goodput), met === null ? (judged ? "no stream in the last minute" : "no SLO") : `${share(met)} of requests within the SLO, target ${share(slo.attainment)}`,
        met === null ? "" : met < slo.attainment ? "bad" : "good"),
      tile("Arrivals", perSecond(demand?.arrivals.last_6_s), `${perSecond(demand?.refused.last_6_s)} rejected; capacity ${perSecond(capacity)}`,
        demand && demand.refused.last_6_s > 0 ? "warn" : ""),
      tile("Queued", count(demand?.queued), demand?.queued ? `the oldest for ${seconds(demand.oldest_s)}` : `${number(demand?.concurrency.last_6_s)} requests in the gateway`,
        demand?.queued ? "warn" : "")),
    h("p", { class: "reason" }, h("b", null, "Last decision: "), status.reason || "none yet", " ",
      h("a", { href: `#decisions/${encodeURIComponent(status.name)}` }, "Why?")),
    status.note ? h("p", { class: "reason" }, h("b", null, "Note: "), status.note) : null,
    operate(model, page));
}

/** Manual overrides, each confirmed. */
function operate(model, page) {
  const { status, modes } = model;
  const own = modes.find((each) => each.mode === status.mode);
  const name = `operate-${status.name}`;
  const field = (id) => document.getElementById(`${name}-${id}`).value;
  const forS = () => (field("for") ? Number(field("for")) * 60 : null);
  const during = () => (field("for") ? ` for ${field("for")} minutes` : " until it is cleared");
  const ask = async (text, ...changes) => {
    if (!(await page.confirm(text))) return;
    try {
      for (const [path, body] of changes) await post(path, { model: status.name, ...body });
      page.problem("");
    } catch (error) {
      page.problem(error.message);
    }
  };
  return h("details", { class: "operate" }, h("summary", null, "Override by hand"),
    h("div", { class: "row wrap" },
      h("label", null, "Replicas ", h("input", { id: `${name}-count`, type: "number", min: own?.least ?? 0, max: own?.most ?? 100, value: status.target })),
      h("button", { type: "button", onclick: () => ask(`Keep ${plural(Number(field("count")), "replica")} of ${status.name}${during()}?`, ["admin/scale", { replicas: Number(field("count")), for_s: forS() }]) }, "Set count"),
      h("label", null, "Mode ", h("select", { id: `${name}-mode` }, modes.map((each) => h("option", { key: each.mode, value: each.mode, selected: each.mode === status.mode }, each.mode)))),
      h("button", { type: "button", onclick: () => ask(`Switch ${status.name} to mode ${field("mode")}${during()}?`, ["admin/mode", { mode: field("mode"), for_s: forS() }]) }, "Set mode"),
      h("label", null, "Minutes ", h("input", { id: `${name}-for`, type: "number", min: 1, value: 10 })),
      h("button", { type: "button", disabled: !status.override, onclick: () => ask(`Return ${status.name} to its policy?`, ["admin/scale", { replicas: "auto" }], ["admin/mode", { mode: "auto" }]) }, "Clear override")),
    status.override ? h("p", { class: "muted" }, `In force: ${status.override.mode}${status.override.count === null ? "" : ` x ${status.override.count}`}${status.override.until ? `, until ${clock(status.override.until)}` : ""}`) : null);
}

function meter(name, value, most, text, state = "") {
  const part = most > 0 ? Math.min(1, value / most) : 0;
  return h("div", { class: `meter ${state}` }, h("span", null, name),
    h("div", { class: "track", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(part * 100), "aria-valuetext": text },
      h("i", { style: { width: `${part * 100}%` } })),
    h("span", { class: "figure" }, text));
}

function replicaCard(replica, handle, sample, gpus) {
  const load = replica.load;
  const serves = handle ? handle.admissible : true;
  const state = replica.state === "ready" && !serves ? "not admitted" : replica.state;
  const kind = { ready: "good", starting: "warn", draining: "warn", asleep: "", stopped: "" }[replica.state] ?? "";
  const heat = [sample?.watts && `${count(sample.watts)} W`, sample?.celsius && `${count(sample.celsius)} °C`, sample?.throttled].filter(Boolean).join(", ");
  const adapters = replica.adapters ?? [];
  return h("li", { key: replica.id, class: `replica ${kind}` },
    h("div", { class: "row" },
      h("b", { class: "id", title: replica.id }, shortId(replica.id)),
      h("span", { class: `badge ${state === "not admitted" ? "bad" : kind}` }, state)),
    h("div", { class: "row small" },
      h("span", null, load ? `shape ${replica.shape}` : "external server"),
      load && h("span", { class: "gpus", role: "img", "aria-label": gpus ? plural(gpus, "GPU") : "no GPU" }, Array.from({ length: Math.min(Math.ceil(gpus), 16) }, () => h("i", null))),
      load && h("span", { class: "muted" }, gpus ? plural(gpus, "GPU") : "CPU")),
    load ? meter("Load", handle?.in_flight ?? load.in_flight, load.bound, `${count(load.running)} running, ${count(load.waiting)} waiting`)
      : meter("Load", handle.in_flight, handle.bound, `${count(handle.in_flight)} of ${count(handle.bound)} in flight`),
    load && meter("KV cache", load.kv_used, 1, `${share(load.kv_used)} used`, load.kv_used > 0.9 ? "bad" : ""),
    h("p", { class: "small muted" },
      [sample ? `${tokens(sample.tokens_per_s)} tokens/s` : null,
        sample && sample.slowness > 1.2 ? `steps take ${number(sample.slowness)} times as long as modelled` : null,
        replica.start_s ? `started in ${seconds(replica.start_s)}` : null, heat || null,
        handle && handle.breaker !== "closed" ? `breaker ${handle.breaker}` : null, replica.reason || null].filter(Boolean).join("; ")),
    adapters.length ? h("p", { class: "chips" }, adapters.slice(0, 6).map((name) => h("span", { class: "chip", title: name }, name.split("@")[0])), adapters.length > 6 ? ` and ${adapters.length - 6} more` : null) : null);
}

function fleet(state) {
  const controller = state.controller;
  const replicas = controller?.replicas ?? state.fleet.fleet.replicas;
  const handles = new Map(state.fleet.replicas.map((each) => [each.id, each]));
  const gpus = new Map();
  const samples = new Map();
  for (const model of controller?.models ?? []) {
    for (const mode of model.modes) gpus.set(`${model.status.name} ${mode.shape}`, mode.gpus);
    for (const sample of model.signals.replicas) samples.set(sample.id, sample);
  }
  const deployed = new Set([...(controller?.models.map((each) => each.status.name) ?? []), ...replicas.map((each) => each.model)]);
  const known = [...replicas, ...state.fleet.replicas.filter((each) => !deployed.has(each.model)).map((each) => ({ ...each, shape: "" }))];
  const perReplica = (replica) => gpus.get(`${replica.model} ${replica.shape}`) ?? 0;
  const used = known.filter((each) => !["asleep", "stopped"].includes(each.state)).reduce((sum, each) => sum + perReplica(each), 0);
  const budget = controller?.budget.gpus;
  const models = [...new Set(known.map((each) => each.model))].sort();
  return h("section", { class: "card", key: "fleet", "aria-label": "Fleet" },
    h("div", { class: "row wrap" }, h("h3", null, "Fleet"),
      h("span", { class: "muted grow" }, `${plural(known.length, "replica")}${controller ? ` by ${controller.actuator}` : ""}`),
      used || budget ? h("div", { class: "budget" }, meter("GPUs", used, budget ?? used, budget ? `${count(used)} of ${count(budget)} in use` : `${count(used)} in use`)) : null),
    models.map((model) => h("div", { key: `fleet-${model}` },
      models.length > 1 ? h("h4", null, model) : null,
      h("ul", { class: "replicas" }, known.filter((each) => each.model === model).slice(0, MANY)
        .sort((a, b) => (a.shape + a.id < b.shape + b.id ? -1 : 1))
        .map((each) => replicaCard(each, handles.get(each.id), samples.get(each.id), perReplica(each)))))),
    known.length > MANY ? h("p", { class: "muted" }, `The first ${MANY} of each model are shown.`) : null,
    known.length ? null : h("p", { class: "muted" }, "No replica is known."));
}

function queue({ waiting }) {
  const total = waiting.reduce((sum, each) => sum + each.requests, 0);
  const most = Math.max(1, ...waiting.map((each) => each.requests));
  const rows = [...waiting].sort((a, b) => PRIORITIES.indexOf(a.priority) - PRIORITIES.indexOf(b.priority) || b.requests - a.requests);
  return h("section", { class: "card", key: "queue", "aria-label": "Queue" },
    h("div", { class: "row" }, h("h3", null, "Queue"), h("span", { class: "muted" }, `${plural(total, "request")} waiting for a replica`)),
    total === 0 ? h("p", { class: "muted" }, "Nothing waits: every request was dispatched at once.")
      : h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Requests that wait" }, h("table", null,
        h("thead", null, h("tr", null, ["Class", "Tenant", "Model", "Requests"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", null, rows.map((each) => h("tr", { key: `${each.model}/${each.priority}/${each.tenant}` },
          h("td", null, each.priority), h("td", null, each.tenant || "without a key"), h("td", null, each.model),
          h("td", { class: "amount" }, h("span", null, count(each.requests)), h("i", { style: { width: `${(each.requests / most) * 100}%` } }))))))));
}

function events(controller) {
  const last = [...controller.events].reverse().slice(0, 12);
  return h("section", { class: "card", key: "events", "aria-label": "Events" }, h("h3", null, "Events"),
    last.length ? h("ol", { class: "events" }, last.map((text, i) => h("li", { key: `${text}-${i}` }, h("time", null, text.slice(0, 8)), " ", text.slice(9))))
      : h("p", { class: "muted" }, "None since the controller started."),
    h("p", { class: "small muted" }, `The controller has run for ${duration(controller.at - controller.epoch)}.`));
}
