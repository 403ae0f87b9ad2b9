// The page: the token, the live state, and one section at a time.

import { events, Failed, request, token } from "./api.js";
import { adapters } from "./adapters.js";
import { decisions } from "./decisions.js";
import { h, patch } from "./dom.js";
import { clock } from "./format.js";
import { now } from "./now.js";
import { playground } from "./playground.js";
import { requests } from "./requests.js";
import { tenants } from "./tenants.js";

const SECTIONS = { now, decisions, requests, adapters, tenants, playground };
const RETRY_MS = 1000;
const SILENT_MS = 5000;

/** What sections read: the last live state, the chosen model, and how to ask before a change. */
const page = {
  state: null, model: "", confirm, problem,
  /** Whether a controller deploys the models, and is not only away; false before the first state. */
  get controlled() {
    return this.state !== null && this.state.problem?.code !== "no_controller";
  },
};
const main = document.getElementById("main");
const link = document.getElementById("link");
let section = null;

function problem(text) {
  const box = document.getElementById("problem");
  box.hidden = !text;
  if (box.textContent !== text) box.textContent = text;
}

function confirm(text) {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-text").textContent = text;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
  });
}

function setLink(state, text) {
  link.dataset.state = state;
  if (link.textContent !== text) link.textContent = text;
}

function route() {
  const name = location.hash.slice(1).split("/")[0];
  return name in SECTIONS ? name : "now";
}

function show() {
  const name = route();
  for (const each of document.querySelectorAll("nav a")) {
    if (each.hash === `#${name}`) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  section?.close?.();
  main.replaceChildren();
  document.title = `${document.querySelector("nav [aria-current]").textContent} · Tidegate`;
  section = token.get() ? SECTIONS[name](main, page) : null;
  if (section === null) askForToken();
  else if (page.state) section.update(page.state);
}

function askForToken(refused = "") {
  document.getElementById("leave").hidden = true;
  setLink("off", "No token");
  const field = h("input", { id: "token", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const form = h("form", { class: "card narrow", onsubmit: (event) => {
    event.preventDefault();
    token.set(field.value.trim());
    show();
    follow();
  } },
  h("h2", null, "Admin token"),
  h("p", null, "The token is in the file ", h("code", null, "admin-token"), " of the state directory; ",
    h("code", null, "tidegate status"), " prints its path. It is kept in this tab only."),
  h("label", { for: "token" }, "Token"), field,
  refused ? h("p", { class: "bad", role: "alert" }, refused) : null,
  h("button", { type: "submit", class: "primary" }, "Open"));
  main.replaceChildren(form);
  field.focus();
}

let following = null;

/** Follow the live state until the token is refused or forgotten; a broken stream is opened again. */
async function follow() {
  following?.abort();
  if (!token.get()) return;
  const mine = (following = new AbortController());
  document.getElementById("leave").hidden = false;
  while (!mine.signal.aborted) {
    const attempt = new AbortController();
    mine.signal.addEventListener("abort", () => attempt.abort());
    let silence = setTimeout(() => attempt.abort(), SILENT_MS);
    try {
      const answer = await request("admin/live", { headers: { accept: "text/event-stream" }, signal: attempt.signal });
      for await (const data of events(answer)) {
        clearTimeout(silence);
        silence = setTimeout(() => attempt.abort(), SILENT_MS);
        receive(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof Failed && error.status === 401) {
        token.forget();
        section?.close?.();
        section = null;
        return askForToken("The port refused this token.");
      }
      if (error instanceof Failed) problem(error.message);
    } finally {
      clearTimeout(silence);
    }
    if (mine.signal.aborted) return;
    setLink("off", "Reconnecting");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function receive(state) {
  const last = page.state?.controller;
  page.state = state;
  setLink("on", "Live");
  problem("");
  if (!state.controller && page.controlled) {
    state.controller = last ?? null;
    problem(`${state.problem.message}${last ? ` Decisions, models and the queue are as of ${clock(last.at)}.` : ""}`);
  }
  chooseModels(state.controller?.models.map((each) => each.status.name) ?? [...new Set(state.fleet.replicas.map((each) => each.model))]);
  section?.update(state);
}

const select = document.getElementById("model");

function chooseModels(names) {
  if (!names.includes(page.model)) page.model = names[0] ?? "";
  document.getElementById("model-pick").hidden = names.length < 2 || !["decisions", "requests"].includes(route());
  patch(select, names.map((name) => h("option", { key: name, value: name }, name)));
  if (select.value !== page.model) select.value = page.model;
}

select.onchange = () => {
  page.model = select.value;
  show();
};

const theme = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  theme.textContent = name === "dark" ? "Light" : "Dark";
  theme.setAttribute("aria-label", `Switch to ${name === "dark" ? "light" : "dark"} colours`);
  section?.restyle?.();
}

theme.onclick = () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("tidegate.theme", name);
  setTheme(name);
};
dark.onchange = () => localStorage.getItem("tidegate.theme") ?? setTheme(dark.matches ? "dark" : "light");
document.getElementById("leave").onclick = () => {
  token.forget();
  following?.abort();
  show();
};

setTheme(localStorage.getItem("tidegate.theme") ?? (dark.matches ? "dark" : "light"));
addEventListener("hashchange", () => {
  show();
  main.focus();
});
show();
follow();
