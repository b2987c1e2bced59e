// The inside view: polls the debug endpoints while somebody looks, and hands what they say to its sections.

import { getJson } from "./api.js";
import { element } from "./dom.js";
import { LatencySection } from "./inside_latency.js";
import { ModelSection } from "./inside_model.js";
import { RequestSection } from "./inside_requests.js";

const EVERY_MS = 700;
const NUM_REQUESTS = 60;
const NUM_STEPS = 120;

export class InsideView {
  constructor(container) {
    this.requests = new RequestSection();
    this.latency = new LatencySection();
    this.models = new Map();
    this.modelList = element("div", { class: "model-sections" });
    this.noModel = element("p", { class: "card hint" }, "No model is loaded. The next request loads the one that it names.");
    this.note = element("p", { class: "note", role: "status", hidden: true });
    this.again = element("button", { type: "button", click: () => this.restart(), hidden: true }, "Try again");
    this.sections = element("div", { class: "sections", hidden: true }, this.noModel, this.modelList, this.requests.element, this.latency.element);
    container.append(this.note, this.again, this.sections);
    this.isShown = false;
    this.timer = null;
    this.stopper = null;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  show(isShown) {
    this.isShown = isShown;
    this.restart();
  }

  restart() {
    clearTimeout(this.timer);
    this.stopper?.abort();
    this.stopper = null;
    if (!this.isShown || document.visibilityState !== "visible") return;
    this.stopper = new AbortController();
    this.poll(this.stopper.signal);
  }

  async poll(signal) {
    let goesOn = true;
    try {
      const [requests, steps] = await Promise.all([
        getJson(`debug/requests?limit=${NUM_REQUESTS}`, signal),
        getJson(`debug/steps?limit=${NUM_STEPS}`, signal),
      ]);
      this.render(requests, steps);
      this.tell("");
    } catch (error) {
      if (signal.aborted) return;
      goesOn = this.fail(error);
    }
    if (goesOn && !signal.aborted) this.timer = setTimeout(() => this.poll(signal), EVERY_MS);
  }

  /** Shows what went wrong; gives whether trying again by itself can help. */
  fail(error) {
    if (error.status === 404) {
      this.sections.hidden = true;
      this.tell("This server does not show its inside: it has no /debug endpoints.");
      return false;
    }
    this.tell(error.status === 401 ? error.message : `${error.message} Trying again.`);
    this.again.hidden = error.status !== 401;
    return error.status !== 401;
  }

  tell(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
    this.again.hidden = true;
  }

  render(requests, steps) {
    this.sections.hidden = false;
    this.requests.render(requests);
    this.latency.render(requests);
    this.noModel.hidden = steps.models.length > 0;
    for (const model of steps.models) {
      if (!this.models.has(model.model)) {
        this.models.set(model.model, new ModelSection(model.model));
        this.modelList.append(this.models.get(model.model).element);
      }
      this.models.get(model.model).render(model, steps.now);
    }
    for (const [name, section] of this.models) {
      if (steps.models.some((model) => model.model === name)) continue;
      section.element.remove();
      this.models.delete(name);
    }
  }
}
