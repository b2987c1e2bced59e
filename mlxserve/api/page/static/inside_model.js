// One model's engine: how much it does now, its steps, its blocks.

import { element, svg } from "./dom.js";
import { count, rate, seconds } from "./format.js";

const RATE_SECONDS = 5;
const CHART = { width: 600, height: 90 };
const NUM_LISTED = 12;

const BLOCKS = [
  ["shared", "shared by several requests"],
  ["used", "used by one request"],
  ["cached", "cached, free to take"],
  ["free", "free"],
];

export class ModelSection {
  constructor(name) {
    this.tiles = element("dl", { class: "tiles" });
    this.pool = element("span", { class: "bar pool", role: "img" }, BLOCKS.map(([key]) => element("span", { class: `part ${key}` })));
    this.poolLegend = element("ul", { class: "legend", "aria-label": "Blocks" });
    this.tokens = svg("svg", chartAttributes("Tokens of each recent step"));
    this.times = svg("svg", chartAttributes("Time of each recent step"));
    this.tokensScale = element("span", { class: "hint" });
    this.timesScale = element("span", { class: "hint" });
    this.listed = element("tbody");
    const legendItem = (name, label) => element("li", {}, element("span", { class: `swatch ${name}` }), label);
    const columns = ["Step", "Rows", "Prefill tokens", "Budget", "Predicted", "Measured"];
    this.element = element(
      "section",
      { class: "card model-card", "aria-label": `Engine of ${name}` },
      element("div", { class: "card-head" }, element("h2", {}, name), element("span", { class: "hint" }, "engine")),
      this.tiles,
      element("div", { class: "chart-head" }, element("h3", {}, "Blocks of the KV cache"), this.poolLegend),
      this.pool,
      element(
        "div",
        { class: "charts" },
        element(
          "figure",
          {},
          element("figcaption", { class: "chart-head" }, element("h3", {}, "Tokens a step"), this.tokensScale, element("ul", { class: "legend" }, legendItem("decode", "Decode rows"), legendItem("prefill", "Prefill"))),
          this.tokens,
        ),
        element(
          "figure",
          {},
          element("figcaption", { class: "chart-head" }, element("h3", {}, "Time a step"), this.timesScale, element("ul", { class: "legend" }, legendItem("measured", "Measured"), legendItem("predicted", "Predicted"))),
          this.times,
        ),
      ),
      element(
        "details",
        { class: "step-list" },
        element("summary", {}, "Last steps as a table"),
        element(
          "div",
          { class: "table", tabindex: 0, role: "group", "aria-label": "Last steps" },
          element("table", { class: "numbers" }, element("thead", {}, element("tr", {}, columns.map((label) => element("th", { scope: "col" }, label)))), this.listed),
        ),
      ),
    );
  }

  render(model, now) {
    this.renderTiles(model, now);
    this.renderPool(model.blocks);
    this.renderSteps(model.steps);
  }

  renderTiles({ num_running: running, num_waiting: waiting, steps }, now) {
    const recent = steps.filter((step) => step.time > now - RATE_SECONDS);
    const perSecond = (measure) => rate(recent.reduce((sum, step) => sum + measure(step), 0) / RATE_SECONDS);
    const last = steps.at(-1);
    const tiles = [
      ["Running", running],
      ["Waiting", waiting],
      ["Decode tokens/s", perSecond((step) => step.num_rows)],
      ["Prefill tokens/s", perSecond((step) => step.num_prefill_tokens)],
      ["Last step", last ? seconds(last.measured) : "–"],
    ];
    this.tiles.replaceChildren(...tiles.map(([label, value]) => element("div", {}, element("dt", {}, label), element("dd", {}, String(value)))));
  }

  renderPool({ used, shared, cached, max }) {
    const numbers = { shared, used: used - shared, cached, free: Math.max(0, max - used - cached) };
    BLOCKS.forEach(([key], index) => (this.pool.children[index].style.width = `${max ? (100 * numbers[key]) / max : 0}%`));
    this.pool.setAttribute("aria-label", BLOCKS.map(([key, label]) => `${numbers[key]} ${label}`).join(", "));
    const text = (key, label) => (max ? `${numbers[key].toLocaleString("en")} ${label}` : label);
    this.poolLegend.replaceChildren(...BLOCKS.map(([key, label]) => element("li", {}, element("span", { class: `swatch ${key}` }), text(key, label))));
  }

  renderSteps(steps) {
    const mostTokens = Math.max(1, ...steps.map((step) => step.num_rows + step.num_prefill_tokens));
    const mostTime = Math.max(0.001, ...steps.map((step) => Math.max(step.measured, step.predicted)));
    this.tokensScale.textContent = `up to ${count(mostTokens, "token")}`;
    this.timesScale.textContent = `up to ${seconds(mostTime)}`;
    drawColumns(this.tokens, steps, (step, x, width) => {
      const rows = (CHART.height * step.num_rows) / mostTokens;
      const prefill = (CHART.height * step.num_prefill_tokens) / mostTokens;
      return [column("decode", x, width, 0, rows), column("prefill", x, width, rows, prefill)];
    });
    drawColumns(this.times, steps, (step, x, width) => [
      column("measured", x, width, 0, (CHART.height * step.measured) / mostTime),
      column("predicted", x, width, Math.max(0, (CHART.height * step.predicted) / mostTime - 2), 2),
    ]);
    const cell = (value) => element("td", {}, String(value));
    const row = (step) =>
      element("tr", {}, cell(step.step_id), cell(step.num_rows), cell(step.num_prefill_tokens), cell(step.budget ?? "–"), cell(seconds(step.predicted)), cell(seconds(step.measured)));
    this.listed.replaceChildren(...steps.slice(-NUM_LISTED).reverse().map(row));
  }
}

function chartAttributes(label) {
  return { viewBox: `0 0 ${CHART.width} ${CHART.height}`, preserveAspectRatio: "none", class: "chart", role: "img", "aria-label": label };
}

/** The newest step is at the right edge; few steps do not become broad ones. */
function drawColumns(chart, steps, draw) {
  const pitch = CHART.width / Math.max(60, steps.length);
  const start = CHART.width - pitch * steps.length;
  const columns = steps.map((step, index) => {
    const title = `step ${step.step_id}: ${count(step.num_rows, "row")}, ${count(step.num_prefill_tokens, "prefill token")}, predicted ${seconds(step.predicted)}, measured ${seconds(step.measured)}`;
    return svg("g", {}, svg("title", {}, title), draw(step, start + pitch * index, pitch * 0.85));
  });
  chart.replaceChildren(...columns);
}

function column(name, x, width, from, height) {
  return svg("rect", { class: name, x: x.toFixed(2), width: width.toFixed(2), y: (CHART.height - from - height).toFixed(2), height: height.toFixed(2) });
}
