// Live and recent requests, each as a bar of its stages.

import { getJson } from "./api.js";
import { element } from "./dom.js";
import { count, seconds } from "./format.js";

// In the order a request passes through them.
export const STAGES = [
  ["front_end", "Front end", "template, tokenizer"],
  ["queue", "Queue", "waiting for a step"],
  ["prefill", "Prefill", "computing the prompt"],
  ["decode", "Decode", "computing the answer"],
  ["delivery", "Delivery", "on the way to the client"],
];

const STATES = {
  front_end: "front end",
  loading: "model loading",
  queued: "queued",
  prefill: "prefill",
  decode: "decode",
  delivering: "delivering",
  done: "done",
};

export class RequestSection {
  constructor() {
    this.rows = new Map();
    this.list = element("ol", { class: "requests" });
    this.empty = element("p", { class: "hint" }, "No requests yet. Ask something in the chat, or send one to /v1.");
    this.scale = element("span", { class: "hint" });
    const legend = STAGES.map(([key, label, hint]) => element("li", { title: hint }, element("span", { class: `swatch ${key}` }), label));
    this.element = element(
      "section",
      { class: "card", "aria-labelledby": "requests-title" },
      element("div", { class: "card-head" }, element("h2", { id: "requests-title" }, "Requests"), this.scale, element("ul", { class: "legend", "aria-label": "Stages" }, legend)),
      this.empty,
      this.list,
    );
  }

  /** All bars have one scale, so that the longest wait is the longest bar. */
  render({ requests }) {
    const longest = Math.max(0.001, ...requests.map((request) => request.total));
    this.empty.hidden = requests.length > 0;
    this.scale.textContent = requests.length ? `full width: ${seconds(longest)}` : "";
    const isOfSeveral = new Set(requests.map((request) => request.model)).size > 1;
    const ids = new Set(requests.map((request) => request.id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    requests.forEach((request, index) => {
      if (!this.rows.has(request.id)) this.rows.set(request.id, new RequestRow(request.id));
      const row = this.rows.get(request.id);
      row.render(request, longest, isOfSeveral);
      // Moving only what is out of place keeps the focus and what is open.
      if (this.list.children[index] !== row.element) this.list.insertBefore(row.element, this.list.children[index] ?? null);
    });
  }
}

class RequestRow {
  constructor(id) {
    this.id = id;
    this.state = element("span", { class: "state" });
    this.name = element("span", { class: "request-name" });
    this.facts = element("span", { class: "facts" });
    this.parts = Object.fromEntries(STAGES.map(([key]) => [key, element("span", { class: `part ${key}` })]));
    this.bar = element("span", { class: "bar", role: "img" }, Object.values(this.parts));
    this.detail = element("div", { class: "detail" });
    this.details = element(
      "details",
      { toggle: () => this.details.open && this.load() },
      element("summary", {}, this.state, this.name, this.bar, this.facts),
      this.detail,
    );
    this.element = element("li", { "data-request": id }, this.details);
  }

  render(request, longest, namesModel) {
    const isNew = this.request?.state !== request.state;
    this.request = request;
    this.element.dataset.state = request.state;
    this.state.textContent = request.state === "done" ? (request.outcome ?? "done") : (STATES[request.state] ?? request.state);
    this.state.title = this.state.textContent;
    this.name.textContent = `…${request.id.slice(-6)}`;
    this.name.title = `${request.id}, ${request.model}`;
    const told = STAGES.filter(([key]) => request.stages[key] > 0).map(([key, label]) => `${label} ${seconds(request.stages[key])}`);
    for (const [key, label] of STAGES) {
      this.parts[key].style.width = `${(100 * request.stages[key]) / longest}%`;
      this.parts[key].title = `${label} ${seconds(request.stages[key])}`;
    }
    this.bar.setAttribute("aria-label", told.join(", ") || "nothing yet");
    // An embedding ends well without a token.
    const isWithoutTokens = request.outcome === "stop" && request.num_generated_tokens === 0;
    this.facts.textContent = [
      namesModel && request.model,
      seconds(request.total),
      request.ttft === null ? null : `first token ${seconds(request.ttft)}`,
      isWithoutTokens ? count(request.num_prompt_tokens, "token") : `${request.num_prompt_tokens} → ${count(request.num_generated_tokens, "token")}`,
      request.num_cached_tokens > 0 && `${request.num_cached_tokens} cached`,
      request.num_preemptions > 0 && count(request.num_preemptions, "preemption"),
    ]
      .filter(Boolean)
      .join(" · ");
    if (isNew && this.details.open) this.load();
  }

  async load() {
    try {
      const { events, prompt } = await getJson(`debug/requests/${encodeURIComponent(this.id)}`);
      this.detail.replaceChildren(...[this.stageList(), prompt && element("pre", { class: "prompt" }, prompt), eventTable(events)].filter(Boolean));
    } catch (error) {
      this.detail.replaceChildren(element("p", { class: "hint" }, error.message));
    }
  }

  stageList() {
    const { stages, total, num_computed_tokens: computed, priority, model, id } = this.request;
    const item = (label, value) => [element("dt", {}, label), element("dd", {}, value)];
    return element(
      "dl",
      { class: "facts-list" },
      item("Request", id),
      item("Model", model),
      STAGES.map(([key, label]) => item(label, seconds(stages[key]))),
      item("In all", seconds(total)),
      item("Tokens computed", computed.toLocaleString("en")),
      item("Priority", String(priority)),
    );
  }
}

/** Tokens come by the hundred; runs of them are one line. */
function eventTable(events) {
  const start = events[0]?.time ?? 0;
  const lines = [];
  for (const event of events) {
    const last = lines.at(-1);
    if (last?.event.kind === event.kind && event.kind === "token") last.times += 1;
    else lines.push({ event, times: 1 });
  }
  const row = ({ event, times }) => {
    const { time, kind, ...details } = event;
    const facts = Object.entries(details).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`);
    const what = times > 1 ? `${kind} × ${times}` : kind;
    return element("tr", {}, element("td", {}, `+${seconds(time - start)}`), element("td", {}, what), element("td", {}, times > 1 ? "" : facts.join(", ")));
  };
  return element(
    "div",
    { class: "table", tabindex: 0, role: "group", "aria-label": "Events" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ["After", "Event", ""].map((label) => element("th", {}, label)))),
      element("tbody", {}, lines.map(row)),
    ),
  );
}
