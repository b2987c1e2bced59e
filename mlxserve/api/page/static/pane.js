// One chat on the screen: its head, its messages, and the field one writes in.

import { MAX_STREAMS } from "./api.js";
import { element, icon, iconButton } from "./dom.js";
import { saveJson, saveMarkdown } from "./export.js";
import { MessageView } from "./message.js";
import { editParameters } from "./parameters.js";

const IDEAS = [
  "Explain in three sentences why the sky is blue.",
  "Write a Python function that finds the primes below n, and explain it.",
  "Make a table of five rivers: country, length, where they end.",
];

export class Pane {
  constructor(conversation, { models, activate, close, remove, askAll }) {
    this.conversation = conversation;
    this.chat = conversation.chat;
    this.views = new Map();
    this.askAll = askAll;
    this.frame = null;
    this.update = this.update.bind(this);
    this.title = element("h2", { class: "pane-title" });
    this.model = element("select", { class: "model", "aria-label": "Model", change: () => this.chooseModel() });
    this.closeButton = iconButton("close", "Close this pane", close);
    this.log = element("div", { class: "log", role: "log", tabindex: 0, "aria-label": "Messages", scroll: () => this.scrolled() });
    // The log stays at its end as text comes and as the pane gets narrower, until somebody scrolls up.
    this.sticks = true;
    this.resizes = new ResizeObserver(() => this.stick());
    this.resizes.observe(this.log);
    this.input = element("textarea", {
      class: "input",
      rows: 1,
      placeholder: "Ask something",
      "aria-label": "Message",
      keydown: (event) => this.keyDown(event),
      input: () => this.fitInput(),
    });
    this.sendButton = iconButton("send", "Send", () => this.send(), { class: "icon-button send" });
    this.stopButton = iconButton("stop", "Stop (Esc)", () => this.conversation.stop(), { class: "icon-button stop" });
    this.againButton = element("button", { type: "button", class: "small-button", click: () => this.conversation.regenerate() }, icon("again"), "Regenerate");
    this.allBox = element("input", { type: "checkbox" });
    this.allLabel = element("label", { class: "all" }, this.allBox, element("span", {}, "Ask all panes"));
    this.element = element(
      "section",
      { class: "pane", "aria-label": "Chat", pointerdown: activate, focusin: activate },
      element(
        "div",
        { class: "pane-head" },
        this.title,
        this.model,
        iconButton("sliders", "Parameters", () => editParameters(this.chat, this.conversation.store)),
        this.exportMenu(),
        iconButton("bin", "Delete this chat", remove),
        this.closeButton,
      ),
      this.log,
      element(
        "div",
        { class: "composer" },
        element("div", { class: "field" }, this.input, this.sendButton, this.stopButton),
        element("div", { class: "under-field" }, this.againButton, this.allLabel, element("span", { class: "hint keys" }, "Enter sends · Shift+Enter: new line · Esc stops")),
      ),
    );
    conversation.addEventListener("update", this.update);
    conversation.addEventListener("running", this.update);
    this.setModels(models);
    this.render();
  }

  close() {
    this.resizes.disconnect();
    this.conversation.removeEventListener("update", this.update);
    this.conversation.removeEventListener("running", this.update);
  }

  focus() {
    this.input.focus();
  }

  setNumPanes(number) {
    this.closeButton.hidden = number < 2;
    this.allLabel.hidden = number < 2;
    if (number < 2) this.allBox.checked = false;
  }

  /** Loaded models first, as the server lists them; a chat keeps a model that is gone, and says so. */
  setModels(models) {
    if (!models.length) return;
    const names = models.map((model) => model.id);
    if (!this.chat.model) this.chat.model = names[0];
    const option = ({ id, description }) => element("option", { value: id, title: description || null }, id);
    const group = (label, items) => items.length > 0 && element("optgroup", { label }, items.map(option));
    const gone = names.includes(this.chat.model) ? [] : [{ id: this.chat.model }];
    const groups = [
      group("Loaded", models.filter((model) => model.loaded)),
      group("Loaded on first use", models.filter((model) => !model.loaded)),
      group("Not on this server", gone),
    ];
    const key = JSON.stringify([models.map(({ id, loaded }) => [id, loaded]), gone]);
    // An open list must not be pulled away from under the user.
    if (this.modelsKey !== key) this.model.replaceChildren(...groups.filter(Boolean));
    this.modelsKey = key;
    this.model.value = this.chat.model;
  }

  chooseModel() {
    this.chat.model = this.model.value;
    this.conversation.store.save(this.chat);
    this.conversation.store.saveDefaults(this.chat);
  }

  exportMenu() {
    const item = (label, save) => {
      const close = () => menu.removeAttribute("open");
      return element("button", { type: "button", click: () => (save(this.chat), close()) }, label);
    };
    const menu = element(
      "details",
      { class: "menu", focusout: (event) => menu.contains(event.relatedTarget) || menu.removeAttribute("open") },
      element("summary", { class: "icon-button", "aria-label": "Export", title: "Export" }, icon("save")),
      element("div", { class: "menu-items" }, item("Markdown", saveMarkdown), item("JSON", saveJson)),
    );
    return menu;
  }

  keyDown(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  send() {
    const text = this.input.value.trim();
    if (!text || this.conversation.isRunning) return;
    this.input.value = "";
    this.fitInput();
    this.sticks = true;
    if (this.allBox.checked) this.askAll(text);
    else this.conversation.ask(text);
  }

  fitInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 220)}px`;
  }

  /** At most once a frame, however fast the tokens come. */
  update() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.render();
    });
  }

  render() {
    const { messages } = this.chat;
    const { isRunning } = this.conversation;
    this.title.textContent = this.chat.title;
    this.title.title = this.chat.title;
    this.element.setAttribute("aria-label", `Chat: ${this.chat.title}`);
    this.log.setAttribute("aria-busy", String(isRunning));
    for (const [message, view] of this.views) {
      if (messages.includes(message)) continue;
      view.element.remove();
      this.views.delete(message);
    }
    for (const message of messages) {
      if (!this.views.has(message)) {
        this.views.set(message, new MessageView(message));
        this.log.append(this.views.get(message).element);
      }
      this.views.get(message).render();
    }
    this.renderWelcome(messages.length === 0);
    this.sendButton.hidden = isRunning;
    this.stopButton.hidden = !isRunning;
    this.againButton.hidden = !this.conversation.canRegenerate;
    this.stick();
  }

  scrolled() {
    this.sticks = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 48;
  }

  stick() {
    if (this.sticks) this.log.scrollTop = this.log.scrollHeight;
  }

  renderWelcome(wanted) {
    if (wanted === Boolean(this.welcome)) return;
    this.welcome?.remove();
    this.welcome = wanted ? this.buildWelcome() : null;
    if (this.welcome) this.log.append(this.welcome);
  }

  buildWelcome() {
    const idea = (text) => element("li", {}, element("button", { type: "button", class: "idea", click: () => this.conversation.ask(text) }, text));
    return element(
      "div",
      { class: "welcome" },
      element("p", { class: "welcome-title" }, "What shall the model answer?"),
      element("ul", {}, IDEAS.map(idea)),
      element("p", { class: "hint" }, `Ask in several chats at once: up to ${MAX_STREAMS} answers stream together.`),
    );
  }
}
