// The chats as they are kept in this browser, one entry of localStorage each.

const PREFIX = "mlxserve.chat.";
const DEFAULTS = "mlxserve.defaults";
const SAVE_EVERY_MS = 1000;

/** Numbers a chat may set; what it does not set is the model's own. Ranges are those of the HTTP API. */
export const PARAMETERS = {
  temperature: { label: "Temperature", min: 0, max: 2, step: 0.05, hint: "0: the likeliest token, always" },
  top_p: { label: "Top p", min: 0.01, max: 1, step: 0.01, hint: "1: off" },
  max_tokens: { label: "Max tokens", min: 1, max: 10000000, step: 1, hint: "of the answer" },
  seed: { label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, hint: "same seed and prompt: same answer" },
};

/** How much a model shall think, as the API is asked for it; without one of these it does as by itself. */
export const THINKING = {
  off: { reasoning_effort: "none" },
  on: { chat_template_kwargs: { enable_thinking: true } },
  low: { reasoning_effort: "low" },
  medium: { reasoning_effort: "medium" },
  high: { reasoning_effort: "high" },
};

// What a message may be when it comes back from storage; "waiting" and "streaming" were cut by the reload.
const FINAL_STATES = new Set(["done", "stopped", "failed", "interrupted"]);

export class Chat {
  constructor({ id, created, model = "", system = "", parameters = {}, messages = [] }) {
    this.id = id;
    this.created = created;
    this.model = model;
    this.system = system;
    this.parameters = parameters;
    this.messages = messages;
  }

  get title() {
    const first = this.messages.find((message) => message.role === "user");
    const line = first?.content.trim().split("\n")[0] ?? "";
    return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New chat";
  }

  /** The parameters as fields of a request. */
  get fields() {
    const { thinking, ...numbers } = this.parameters;
    return { ...numbers, ...THINKING[thinking] };
  }

  /**
   * Messages as the API wants them, thoughts apart from the answer. A question without an answer is left out: many
   * templates want turns.
   */
  get history() {
    const turns = this.system.trim() ? [{ role: "system", content: this.system }] : [];
    this.messages.forEach((message, index) => {
      const answer = this.messages[index + 1];
      const isAnswered = answer === undefined || answer.content !== "";
      const counts = message.role === "user" ? isAnswered : message.content !== "";
      if (!counts) return;
      turns.push({ role: message.role, content: message.content });
      if (message.thinking) turns.at(-1).reasoning_content = message.thinking;
    });
    return turns;
  }
}

/** Events: "change" when a chat came, went, or got another title; "full" when the browser keeps no more. */
export class ChatStore extends EventTarget {
  constructor() {
    super();
    this.chats = new Map();
    this.unsaved = new Map();
  }

  load() {
    for (const key of Object.keys(localStorage).filter((each) => each.startsWith(PREFIX))) {
      const chat = readChat(localStorage.getItem(key));
      if (chat && PREFIX + chat.id === key) this.chats.set(chat.id, chat);
    }
  }

  /** Newest first. */
  list() {
    return [...this.chats.values()].sort((a, b) => b.created - a.created);
  }

  create(model) {
    const defaults = readObject(localStorage.getItem(DEFAULTS));
    const chat = new Chat({
      id: randomId(),
      created: Date.now(),
      model: model || text(defaults.model),
      system: text(defaults.system),
      parameters: readParameters(defaults.parameters),
    });
    this.chats.set(chat.id, chat);
    this.save(chat);
    this.changed();
    return chat;
  }

  save(chat) {
    clearTimeout(this.unsaved.get(chat.id));
    this.unsaved.delete(chat.id);
    if (!this.chats.has(chat.id)) return;
    try {
      localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
    } catch {
      this.dispatchEvent(new Event("full"));
    }
  }

  /** Saves within a second: an answer changes with every token. */
  saveSoon(chat) {
    if (!this.unsaved.has(chat.id)) this.unsaved.set(chat.id, setTimeout(() => this.save(chat), SAVE_EVERY_MS));
  }

  saveDefaults({ model, system, parameters }) {
    try {
      localStorage.setItem(DEFAULTS, JSON.stringify({ model, system, parameters }));
    } catch {
      this.dispatchEvent(new Event("full"));
    }
  }

  remove(chat) {
    clearTimeout(this.unsaved.get(chat.id));
    this.unsaved.delete(chat.id);
    this.chats.delete(chat.id);
    localStorage.removeItem(PREFIX + chat.id);
    this.changed();
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }
}

// Storage may hold anything: an older version's chats, another program's, half of one.
function readChat(json) {
  const { id, created, model, system, parameters, messages } = readObject(json);
  if (typeof id !== "string" || !Number.isFinite(created) || !Array.isArray(messages)) return null;
  const isMessage = (each) => each && ["user", "assistant"].includes(each.role) && typeof each.content === "string";
  if (!messages.every(isMessage)) return null;
  for (const message of messages) {
    if (message.role !== "assistant") continue;
    if (!FINAL_STATES.has(message.state)) message.state = "interrupted";
    message.thinking = text(message.thinking);
  }
  return new Chat({ id, created, model: text(model), system: text(system), parameters: readParameters(parameters), messages });
}

function readObject(json) {
  try {
    const value = JSON.parse(json);
    return value && typeof value === "object" ? value : {};
  } catch {
    return {};
  }
}

function readParameters(value) {
  const entries = Object.entries(value && typeof value === "object" ? value : {});
  const isKnown = ([name, each]) => (name === "thinking" ? Object.hasOwn(THINKING, each) : Object.hasOwn(PARAMETERS, name) && Number.isFinite(each));
  return Object.fromEntries(entries.filter(isKnown));
}

function text(value) {
  return typeof value === "string" ? value : "";
}

// crypto.randomUUID is missing where the page comes over plain HTTP from another machine.
function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
