// Playground: one prompt, streamed, of any model or adapter, with its timing and route.

import { events, get, request } from "./api.js";
import { h, patch } from "./dom.js";
import { count, number, seconds } from "./format.js";
import { route } from "./requests.js";

export function playground(main, page) {
  const names = new Set();
  const model = h("select", { id: "play-model" });
  const prompt = h("textarea", { id: "play-prompt", rows: 4, required: true });
  prompt.value = "What is the capital of France?";
  const limit = h("input", { id: "play-limit", type: "number", min: 1, max: 4096, value: 128 });
  const heat = h("input", { id: "play-heat", type: "number", min: 0, max: 2, step: 0.1, value: 0 });
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  const stop = h("button", { type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
  const output = h("pre", { class: "output", tabindex: "0", "aria-label": "Answer", role: "region" });
  const state = h("p", { role: "status", class: "muted" });
  const timing = h("dl", { class: "tiles" });
  const routed = h("div", { class: "routed" });
  let running = null;

  main.append(h("div", { class: "columns" },
    h("form", { class: "card form", onsubmit: (event) => {
      event.preventDefault();
      ask();
    } }, h("h2", null, "Playground"),
    h("label", { for: "play-model" }, "Model or adapter"), model,
    h("label", { for: "play-prompt" }, "Prompt"), prompt,
    h("div", { class: "row wrap" }, h("label", { for: "play-limit" }, "At most tokens "), limit, h("label", { for: "play-heat" }, "Temperature "), heat),
    h("div", { class: "row" }, send, stop)),
    h("section", { class: "card", "aria-label": "Answer and timing" }, h("h2", null, "Answer"), state, output, timing, routed)));

  function figures(began, first, last, chunks, usage) {
    const out = usage?.completion_tokens ?? chunks;
    const took = last - first;
    const tiles = [
      ["First token", first ? seconds((first - began) / 1000) : "–", "as this browser saw it"],
      ["Total", seconds((last - began) / 1000), ""],
      ["Output tokens", count(out), usage ? `${count(usage.prompt_tokens)} prompt tokens` : "counted by events"],
      ["Tokens per second", took > 0 && out > 1 ? number(((out - 1) / took) * 1000) : "–", took > 0 && out > 1 ? `${seconds(took / 1000 / (out - 1))} per token` : ""],
    ];
    patch(timing, tiles.map(([name, figure, detail]) => h("div", { class: "tile", key: name }, h("dt", null, name), h("dd", null, h("b", null, figure), h("span", null, detail)))));
  }

  async function ask() {
    running?.abort();
    running = new AbortController();
    stop.disabled = false;
    send.disabled = true;
    output.textContent = "";
    patch(timing);
    patch(routed);
    state.textContent = "Waiting for the first token";
    const began = performance.now();
    let first = 0;
    let chunks = 0;
    let usage = null;
    try {
      const answer = await request("admin/playground", { method: "POST", signal: running.signal, body: JSON.stringify({
        model: model.value, messages: [{ role: "user", content: prompt.value }], max_tokens: Number(limit.value),
        temperature: Number(heat.value), stream: true, stream_options: { include_usage: true },
      }) });
      const decided = JSON.parse(answer.headers.get("x-tidegate-explain") ?? "{}");
      for await (const data of events(answer)) {
        if (data === "[DONE]") break;
        const part = JSON.parse(data);
        if (part.error) throw new Error(part.error.message);
        usage = part.usage ?? usage;
        const delta = part.choices?.[0]?.delta ?? {};
        const text = delta.content ?? delta.reasoning_content ?? "";
        if (!text) continue;
        first ||= performance.now();
        chunks += 1;
        state.textContent = "Streaming";
        output.append(text);
        figures(began, first, performance.now(), chunks, usage);
      }
      figures(began, first, performance.now(), chunks, usage);
      state.textContent = "Complete";
      if (decided.candidates) patch(routed, h("h3", null, "Route"), h("ol", { class: "routes" }, route({ ...decided, ttft_s: first ? (first - began) / 1000 : null })));
    } catch (error) {
      state.textContent = error.name === "AbortError" ? "Stopped" : `Failed: ${error.message}`;
    } finally {
      stop.disabled = true;
      send.disabled = false;
    }
  }

  function offer(found) {
    for (const name of found) {
      if (names.has(name)) continue;
      names.add(name);
      model.append(h("option", { value: name }, name));
    }
    if (!model.value) model.value = page.model;
  }
  let asked = false;
  async function offerAdapters() {
    if (asked || !page.controlled) return;
    asked = true;
    offer((await get("admin/adapters")).adapters.map((each) => each.name));
  }
  return {
    update: (live) => {
      offerAdapters().catch(() => {});
      offer(live.fleet.fleet.models.filter((each) => each.runner === "generate").map((each) => each.name).concat(live.fleet.replicas.map((each) => each.model)));
    },
    close: () => running?.abort(),
  };
}
