// Where the page starts: the two views, the theme, and the dialog for the API key.

import { listModels, onKeyNeeded, storeKey } from "./api.js";
import { ChatStore } from "./chats.js";
import { ChatView } from "./chat_view.js";
import { element, icon, iconButton } from "./dom.js";
import { InsideView } from "./inside.js";

const byId = (id) => document.getElementById(id);
const MODELS_EVERY_MS = 15000;

const notices = new Map();
let declined = false;

const store = new ChatStore();
const chatView = new ChatView({ store, sidebar: byId("sidebar"), panes: byId("panes"), drawer: byId("drawer") });
const insideView = new InsideView(byId("inside"));

onKeyNeeded(askForKey);
store.load();
store.addEventListener("full", () => notify("storage", "The browser's storage is full: new messages are not kept. Export or delete some chats."));
window.addEventListener("pagehide", () => chatView.interrupt());
byId("drawer").append(icon("menu"));
byId("top-end").append(keyButton(), themeButton());
chatView.start();
window.addEventListener("hashchange", showView);
showView();
refreshModels();
setInterval(() => document.visibilityState === "visible" && refreshModels(), MODELS_EVERY_MS);

function showView() {
  const name = location.hash === "#inside" ? "inside" : "chat";
  for (const each of ["chat", "inside"]) byId(each).hidden = each !== name;
  for (const link of document.querySelectorAll(".views a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("drawer").classList.toggle("out-of-place", name !== "chat");
  insideView.show(name === "inside");
}

async function refreshModels() {
  // Nobody wants the same dialog again every few seconds.
  if (declined) return;
  try {
    chatView.setModels(await listModels());
    notify("server", "");
  } catch (error) {
    notify("server", error.message);
  }
}

/** One line above everything, for each thing that can be wrong; an empty message takes it away. */
function notify(about, message) {
  notices.set(about, message);
  const text = [...notices.values()].filter(Boolean).join(" ");
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

/** Resolves to the key, or to null. `wrong`: the one sent was refused. */
function askForKey(wrong) {
  return new Promise((resolve) => {
    const input = element("input", { id: "api-key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
    const cancel = element("button", { type: "button", click: () => dialog.close() }, "Cancel");
    const form = element(
      "form",
      { method: "dialog", submit: (event) => (event.preventDefault(), dialog.close(input.value.trim())) },
      element("h2", {}, "API key"),
      element("p", { class: wrong ? "error-text" : null }, wrong ? "The server refused that key." : "This server needs a key."),
      element("label", { for: "api-key" }, "Key"),
      input,
      element("p", { class: "hint" }, "Kept in this tab until it is closed."),
      element("div", { class: "dialog-end" }, cancel, element("button", { type: "submit", class: "primary" }, "Use key")),
    );
    const dialog = element("dialog", { class: "dialog", "aria-label": "API key", close: done }, form);
    function done() {
      dialog.remove();
      declined = !dialog.returnValue;
      resolve(dialog.returnValue || null);
    }
    document.body.append(dialog);
    dialog.showModal();
  });
}

function keyButton() {
  return iconButton("key", "API key", async () => {
    const key = await askForKey(false);
    if (!key) return;
    storeKey(key);
    declined = false;
    refreshModels();
  });
}

function themeButton() {
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const button = iconButton("moon", "Theme", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    localStorage.setItem("mlxserve.theme", document.documentElement.dataset.theme);
    update();
  });
  function update() {
    const label = dark() ? "Light theme" : "Dark theme";
    button.replaceChildren(icon(dark() ? "sun" : "moon"));
    button.setAttribute("aria-label", label);
    button.title = label;
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  update();
  return button;
}
