// Puts the page together: looks at the engine once a second, and asks for the key where needed.

import { keys, request, ServerError } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { EngineView } from "./engine.js";
import { ExpertMap } from "./experts.js";

const INTERVAL_MS = 1000;
const LOOKS_PER_EXPERTS = 5; // counts of experts are asked for less often
const THEMES = ["system", "dark", "light"];

const view = new EngineView(() => look(false));
const experts = new ExpertMap(byId("experts"));
new Chat(
  (id) => {
    view.ownRequest = id;
  },
  (error) => report(error),
);

// --- the engine -------------------------------------------------------------------------------

let newest = 0; // replies that were overtaken by a later one are dropped

async function look(isTick) {
  const own = ++newest;
  const chosen = view.chosen;
  try {
    const query = chosen === null ? "" : `?sequence=${chosen}`;
    const state = await (await request(`dashboard/state${query}`)).json();
    if (own === newest || isTick) show(state, isTick);
  } catch (error) {
    report(error);
  }
}

let hasExperts = true; // until the server says otherwise

async function lookAtExperts() {
  try {
    const counts = await (await request("dashboard/experts")).json();
    hasExperts = counts.layers.length > 0;
    if (hasExperts) experts.show(counts);
  } catch (error) {
    report(error);
  }
}

function show(state, isTick) {
  setText("model", state.model);
  setText("version", `Quire ${state.version}`);
  byId("banner").hidden = true;
  byId("max-tokens").max = state.max_model_len;
  const busy = state.num_running + state.num_waiting > 0;
  setStatus(state.paused ? "paused" : busy ? "busy" : "ready", state.paused ? "bad" : busy ? "busy" : "good");
  view.show(state, isTick);
}

function report(error) {
  if (error instanceof ServerError && error.status === 401) {
    setStatus("needs a key", "bad");
    askForKey();
    return;
  }
  if (error instanceof ServerError && error.status < 500) return; // shown where it was caused
  setStatus("down", "bad");
  byId("banner").hidden = false;
  setText("banner", error instanceof ServerError ? error.message : "The server does not answer.");
}

function setStatus(text, kind) {
  setText("status", text);
  byId("status").className = `pill ${kind}`;
}

// --- the key ----------------------------------------------------------------------------------

function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key-error").hidden = keys.get() === null;
  byId("key-button").hidden = false;
  byId("key").value = "";
  dialog.showModal();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keys.set(byId("key").value.trim());
  byId("key-dialog").close();
  look(true);
});
byId("key-button").addEventListener("click", askForKey);

// --- colours ----------------------------------------------------------------------------------

const system = window.matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  localStorage.setItem("quire-theme", name);
  const dark = name === "dark" || (name === "system" && system.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  setText("theme", `Theme: ${name}`);
  view.redraw();
  experts.draw();
}

const theme = () => {
  const kept = localStorage.getItem("quire-theme");
  return THEMES.includes(kept) ? kept : "system";
};

byId("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
});
system.addEventListener("change", () => setTheme(theme()));
setTheme(theme());

// --- the clock --------------------------------------------------------------------------------

// A hidden page asks for nothing, nor does one that waits for a key.
async function run() {
  const isShown = () => !document.hidden && !byId("key-dialog").open;
  for (let looks = 0; ; ) {
    if (isShown()) await look(true);
    if (isShown()) {
      if (hasExperts && looks % LOOKS_PER_EXPERTS === 0) await lookAtExperts();
      looks += 1;
    }
    await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
  }
}

run();
byId("prompt").focus();
