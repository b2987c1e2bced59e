// The list of chats, and the panes that show some of them side by side.

import { Conversation } from "./conversation.js";
import { element, icon, iconButton } from "./dom.js";
import { Pane } from "./pane.js";

const PANES = "mlxserve.panes";
const MAX_PANES = 4;
const NARROW = matchMedia("(max-width: 760px)");

export class ChatView {
  constructor({ store, sidebar, panes, drawer }) {
    this.store = store;
    this.sidebar = sidebar;
    this.panesElement = panes;
    this.drawer = drawer;
    this.models = [];
    this.conversations = new Map();
    this.panes = [];
    this.active = null;
    this.list = element("ul", { class: "chat-list" });
  }

  start() {
    this.sidebar.append(
      element("button", { type: "button", class: "primary wide", click: () => this.newChat(false) }, icon("plus"), "New chat"),
      element("button", { type: "button", class: "wide not-narrow", click: () => this.newChat(true) }, icon("beside"), "New chat beside"),
      this.list,
      element("p", { class: "hint sidebar-hint" }, "Chats stay in this browser. Several can stream at once: the server computes them as one batch."),
    );
    this.drawer.addEventListener("click", () => this.openDrawer(!this.sidebar.classList.contains("open")));
    this.store.addEventListener("change", () => this.renderList());
    document.addEventListener("keydown", (event) => this.keyDown(event));
    NARROW.addEventListener("change", () => this.keepPanes());
    const { ids, active } = readPanes();
    const chats = ids.map((id) => this.store.chats.get(id)).filter(Boolean).slice(0, MAX_PANES);
    const shown = chats.length ? chats : this.store.list().slice(0, 1);
    for (const chat of shown) this.addPane(chat);
    if (!this.panes.length) this.addPane(this.store.create(""));
    this.activate(this.panes.find((pane) => pane.chat.id === active) ?? this.panes[0]);
  }

  setModels(models) {
    this.models = models;
    for (const pane of this.panes) pane.setModels(models);
  }

  conversation(chat) {
    let conversation = this.conversations.get(chat.id);
    if (!conversation) {
      conversation = new Conversation(chat, this.store);
      conversation.addEventListener("running", () => this.renderList());
      this.conversations.set(chat.id, conversation);
    }
    return conversation;
  }

  interrupt() {
    for (const conversation of this.conversations.values()) conversation.interrupt();
  }

  newChat(beside) {
    const chat = this.store.create(this.active?.chat.model);
    this.show(chat, beside);
    this.active.focus();
  }

  /** Shows a chat in the active pane, or in one more beside it. */
  show(chat, beside) {
    const shown = this.panes.find((pane) => pane.chat === chat);
    if (shown) this.activate(shown);
    else if (beside && this.panes.length < MAX_PANES) this.activate(this.addPane(chat));
    else {
      const before = this.active;
      const pane = this.makePane(chat);
      this.panes.splice(this.panes.indexOf(before), 1, pane);
      before.element.replaceWith(pane.element);
      before.close();
      this.activate(pane);
    }
    this.openDrawer(false);
  }

  addPane(chat) {
    const pane = this.makePane(chat);
    this.panes.push(pane);
    this.panesElement.append(pane.element);
    return pane;
  }

  makePane(chat) {
    const pane = new Pane(this.conversation(chat), {
      models: this.models,
      activate: () => this.active === pane || this.activate(pane),
      close: () => this.closePane(pane),
      remove: () => this.remove(chat),
      askAll: (text) => this.panes.forEach((each) => each.conversation.ask(text)),
    });
    return pane;
  }

  closePane(pane) {
    this.panes = this.panes.filter((each) => each !== pane);
    pane.element.remove();
    pane.close();
    if (!this.panes.length) this.addPane(this.store.list()[0] ?? this.store.create(pane.chat.model));
    this.activate(this.active === pane ? this.panes.at(-1) : this.active);
  }

  remove(chat) {
    if (chat.messages.length && !confirm(`Delete “${chat.title}”?`)) return;
    this.conversation(chat).stop();
    this.conversations.delete(chat.id);
    this.store.remove(chat);
    const pane = this.panes.find((each) => each.chat === chat);
    if (pane) this.closePane(pane);
  }

  activate(pane) {
    this.active = pane;
    for (const each of this.panes) each.element.classList.toggle("active", each === pane);
    for (const each of this.panes) each.setNumPanes(this.panes.length);
    this.keepPanes();
    this.renderList();
  }

  keepPanes() {
    this.panesElement.style.setProperty("--panes", NARROW.matches ? 1 : this.panes.length);
    try {
      localStorage.setItem(PANES, JSON.stringify({ ids: this.panes.map((pane) => pane.chat.id), active: this.active?.chat.id }));
    } catch {
      this.store.dispatchEvent(new Event("full"));
    }
  }

  /** Escape stops the answer of the pane one is in, wherever in it the focus is. */
  keyDown(event) {
    if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
    if (this.sidebar.classList.contains("open")) {
      this.openDrawer(false);
      this.drawer.focus();
    } else this.active?.conversation.stop();
  }

  openDrawer(open) {
    this.sidebar.classList.toggle("open", open);
    this.drawer.setAttribute("aria-expanded", String(open));
  }

  renderList() {
    const focused = document.activeElement?.dataset?.chat;
    this.list.replaceChildren(...this.store.list().map((chat) => this.listItem(chat)));
    if (focused) this.list.querySelector(`[data-chat="${CSS.escape(focused)}"]`)?.focus();
  }

  listItem(chat) {
    const isShown = this.panes.some((pane) => pane.chat === chat);
    const isRunning = this.conversations.get(chat.id)?.isRunning;
    const open = element(
      "button",
      { type: "button", class: "chat-open", "data-chat": chat.id, "aria-current": this.active?.chat === chat ? "true" : null, click: () => this.show(chat, false) },
      isRunning && element("span", { class: "running-dot", role: "img", "aria-label": "streaming" }),
      element("span", { class: "chat-title" }, chat.title),
    );
    return element(
      "li",
      { class: isShown ? "shown" : null },
      open,
      !isShown && this.panes.length < MAX_PANES && iconButton("beside", `Open “${chat.title}” beside`, () => this.show(chat, true), { class: "icon-button not-narrow" }),
      iconButton("bin", `Delete “${chat.title}”`, () => this.remove(chat)),
    );
  }
}

function readPanes() {
  try {
    const { ids, active } = JSON.parse(localStorage.getItem(PANES));
    return { ids: Array.isArray(ids) ? [...new Set(ids)] : [], active };
  } catch {
    return { ids: [], active: null };
  }
}
