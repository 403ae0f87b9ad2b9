// Tenants: their share, what they use now, and what they have used since the workers started.

import { table } from "./explain.js";
import { h, patch } from "./dom.js";
import { count, number, tokens } from "./format.js";

const WINDOW_S = 30;

export function tenants(main) {
  const seen = new Map();
  const body = h("div", null);
  main.append(h("section", { class: "card", "aria-label": "Tenants" }, h("h2", null, "Tenants"),
    h("p", { class: "muted" }, "Tokens count since the gateway workers of this host started; rates are over the last 30 s. The weight is a tenant's share when tenants compete."), body));
  return {
    update(state) {
      // The controller's time stands still while it is away; the tokens, which gateways count, do not.
      const at = performance.now() / 1000;
      const waiting = new Map();
      for (const each of state.controller?.waiting ?? []) waiting.set(each.tenant, (waiting.get(each.tenant) ?? 0) + each.requests);
      patch(body, table("Use by tenant", ["Tenant", "Priority", "Weight", "In flight", "Queued", "Prompt tokens", "Output tokens", "Prompt tokens per second", "Output tokens per second"], state.tenants.map((each) => {
        const samples = seen.get(each.name) ?? [];
        samples.push([at, each.prompt_tokens, each.output_tokens]);
        while (samples.length > 2 && samples[0][0] < at - WINDOW_S) samples.shift();
        seen.set(each.name, samples);
        const [first] = samples;
        const rate = (i, value) => (at - first[0] < 2 ? null : Math.max(0, value - first[i]) / (at - first[0]));
        return h("tr", { key: each.name },
          h("th", { scope: "row" }, each.name || "without a key", each.admin ? h("span", { class: "badge" }, "admin") : null),
          h("td", null, each.priority), h("td", null, number(each.weight)), h("td", null, count(each.in_flight)), h("td", null, count(waiting.get(each.name) ?? 0)),
          h("td", null, tokens(each.prompt_tokens)), h("td", null, tokens(each.output_tokens)),
          h("td", null, number(rate(1, each.prompt_tokens))), h("td", null, number(rate(2, each.output_tokens))));
      })));
    },
  };
}
