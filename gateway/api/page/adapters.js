// Adapters: where they are loaded, how they are used, and their versions.

import { get } from "./api.js";
import { h, patch } from "./dom.js";
import { bytes, clock, count, perSecond, plural, seconds, share, shortId } from "./format.js";

const EVERY_MS = 2000;

export function adapters(main, page) {
  const body = h("div", null);
  main.append(h("section", { class: "card", "aria-label": "Adapters" }, h("h2", null, "Adapters"), body));
  const read = async () => {
    if (page.state && !page.controlled) patch(body, h("p", { class: "muted" }, "These servers manage their adapters themselves. Now shows which of them each has loaded."));
    if (!page.controlled) return;
    try {
      show((await get("admin/adapters")).adapters);
    } catch (error) {
      patch(body, h("p", { class: "muted" }, error.message));
    }
  };
  function show(found) {
    patch(body, found.length ? found.map(card) : h("p", { class: "muted" }, "There is no adapter. ", h("code", null, "tidegate adapter add"), " adds one."));
  }
  const timer = setInterval(read, EVERY_MS);
  read();
  return { update: () => body.firstChild ?? read(), close: () => clearInterval(timer) };
}

function card(each) {
  const state = { ready: "good", partial: "warn", failed: "bad", fetching: "warn" }[each.state];
  return h("article", { class: "adapter", key: `${each.model}/${each.name}` },
    h("div", { class: "row wrap" }, h("h3", null, each.name), h("span", { class: `badge ${state}` }, each.state), h("span", { class: "muted" }, `on ${each.model}`),
      h("span", { class: "grow" }, `${perSecond(each.requests_per_s)}; ${each.hit_rate === null ? "no request yet" : `${share(each.hit_rate)} of requests found it loaded`}`),
      each.tenants.length ? h("span", { class: "muted" }, `for ${each.tenants.join(", ")}`) : null),
    each.note ? h("p", null, each.note) : null,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Versions of ${each.name}` }, h("table", null,
      h("thead", null, h("tr", null, ["Version", "Share", "Loaded on", "Requests", "Loads", "Mean load", "Rank", "Size", "Last used"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, each.versions.map((version) => h("tr", { key: version.digest },
        h("th", { scope: "row", title: version.digest }, `v${version.number}`), h("td", null, share(version.share)),
        h("td", null, version.loaded.length ? version.loaded.map((id) => h("span", { class: "chip", key: id }, shortId(id))) : "no replica", version.refused.length ? h("p", { class: "bad" }, `${plural(version.refused.length, "replica")} refused it: ${version.refused[0].reason}`) : null),
        h("td", null, perSecond(version.requests_per_s)), h("td", null, count(version.loads)), h("td", null, seconds(version.load_s)), h("td", null, count(version.rank)), h("td", null, bytes(version.size)),
        h("td", null, version.last_used === null ? "never" : clock(version.last_used))))))));
}
