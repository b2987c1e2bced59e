// The dialog for what a chat asks with: system prompt and sampling parameters.

import { PARAMETERS, THINKING } from "./chats.js";
import { element } from "./dom.js";

let dialogs = 0;

export function editParameters(chat, store) {
  dialogs += 1;
  const id = (name) => `parameter-${dialogs}-${name}`;
  const system = element("textarea", { id: id("system"), rows: 4, placeholder: "None" });
  system.value = chat.system;
  const inputs = Object.entries(PARAMETERS).map(([name, { min, max, step }]) => {
    const input = element("input", { id: id(name), name, type: "number", inputmode: "decimal", min, max, step: step === 1 ? 1 : "any", placeholder: "the model's" });
    if (name === "seed") input.placeholder = "random";
    if (name === "max_tokens") input.placeholder = "until the context is full";
    input.value = chat.parameters[name] ?? "";
    return input;
  });
  const options = ["", ...Object.keys(THINKING)].map((name) => element("option", { value: name }, name || "the model's default"));
  const thinking = element("select", { id: id("thinking") }, options);
  thinking.value = chat.parameters.thinking ?? "";
  const form = element(
    "form",
    { method: "dialog", submit: save },
    element("h2", {}, "Parameters"),
    element("label", { for: id("system") }, "System prompt"),
    system,
    element(
      "div",
      { class: "parameter-grid" },
      inputs.map((input) => {
        const { label, hint } = PARAMETERS[input.name];
        return parameter(input, label, hint);
      }),
      parameter(thinking, "Thinking", "before the answer; not every model takes each of these"),
    ),
    element("p", { class: "hint" }, "They hold for this chat from its next answer on, and new chats begin with them. An empty field leaves it to the model."),
    element(
      "div",
      { class: "dialog-end" },
      element("button", { type: "button", click: clear }, "Clear all"),
      element("span", { class: "spacer" }),
      element("button", { type: "button", click: () => dialog.close() }, "Cancel"),
      element("button", { type: "submit", class: "primary" }, "Save"),
    ),
  );
  const dialog = element("dialog", { class: "dialog", "aria-label": "Parameters", close: () => dialog.remove() }, form);

  function clear() {
    for (const field of [system, thinking, ...inputs]) field.value = "";
  }

  function save() {
    const given = inputs.filter((input) => Number.isFinite(input.valueAsNumber));
    chat.system = system.value;
    chat.parameters = Object.fromEntries(given.map((input) => [input.name, input.valueAsNumber]));
    if (thinking.value) chat.parameters.thinking = thinking.value;
    store.save(chat);
    store.saveDefaults(chat);
  }

  document.body.append(dialog);
  dialog.showModal();
}

function parameter(field, label, hint) {
  return element("div", {}, element("label", { for: field.id }, label), field, element("p", { class: "hint" }, hint));
}
