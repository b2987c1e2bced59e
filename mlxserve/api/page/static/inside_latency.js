// Percentiles of the requests in the server's ring that are done.

import { element } from "./dom.js";
import { percentile, seconds } from "./format.js";

const PERCENTILES = [50, 95, 99];

const MEASURES = [
  ["Queue", "in the queue", (request) => request.stages.queue],
  ["TTFT", "time to first token", (request) => request.ttft],
  ["TPOT", "decode time a token", timePerToken],
  ["E2E", "received to delivered", (request) => request.total],
];

export class LatencySection {
  constructor() {
    this.body = element("tbody");
    this.basis = element("span", { class: "hint" });
    const head = ["", ...PERCENTILES.map((p) => `P${p}`)].map((label) => element("th", { scope: "col" }, label));
    this.element = element(
      "section",
      { class: "card", "aria-labelledby": "latency-title" },
      element("div", { class: "card-head" }, element("h2", { id: "latency-title" }, "Latency"), this.basis),
      element("table", { class: "numbers" }, element("thead", {}, element("tr", {}, head)), this.body),
    );
  }

  render({ requests }) {
    const done = requests.filter((request) => request.state === "done" && request.ttft !== null);
    const numModels = new Set(done.map((request) => request.model)).size;
    this.basis.textContent = `of the last ${done.length} requests that were answered${numModels > 1 ? `, by ${numModels} models` : ""}`;
    this.body.replaceChildren(
      ...MEASURES.map(([label, hint, measure]) => {
        const values = done.map(measure).filter(Number.isFinite).sort((a, b) => a - b);
        const cells = PERCENTILES.map((p) => element("td", {}, seconds(percentile(values, p))));
        return element("tr", {}, element("th", { scope: "row" }, label, element("span", { class: "hint" }, ` ${hint}`)), cells);
      }),
    );
  }
}

function timePerToken(request) {
  return request.num_generated_tokens > 1 ? request.stages.decode / (request.num_generated_tokens - 1) : null;
}
