// One message of a chat.

import { copyButton, element } from "./dom.js";
import { rate, seconds } from "./format.js";
import { renderMarkdown } from "./markdown.js";

const STATES = {
  stopped: "Stopped.",
  interrupted: "Interrupted: the page was closed or reloaded.",
};

export class MessageView {
  constructor(message) {
    this.message = message;
    this.timer = null;
    this.body = element("div", { class: "body" });
    this.thinking = null;
    this.foot = element("div", { class: "foot" });
    this.status = element("span", { class: "status" });
    this.copy = copyButton(() => message.content);
    this.foot.append(this.status, this.copy);
    const isUser = message.role === "user";
    this.element = element(
      "article",
      { class: `message ${message.role}`, "aria-label": isUser ? "You" : `Answer of ${message.model ?? "the model"}` },
      this.body,
      !isUser && this.foot,
    );
    if (isUser) this.body.textContent = message.content;
  }

  render() {
    const { message } = this;
    if (message.role === "user" || this.isFinal) return;
    this.renderThinking();
    renderMarkdown(this.body, message.content);
    this.element.dataset.state = message.state;
    this.copy.hidden = message.state === "waiting" || !message.content;
    this.isFinal = !["waiting", "streaming"].includes(message.state);
    this.renderStatus();
    if (message.state === "waiting") this.timer ??= setInterval(() => this.renderStatus(), 200);
    else clearInterval(this.timer);
  }

  renderStatus() {
    const { message } = this;
    this.status.classList.toggle("error-text", message.state === "failed");
    this.status.textContent = statusText(message);
    if (message.timings) this.status.title = timingsTitle(message.timings);
    if (!this.element.isConnected && message.state !== "waiting") clearInterval(this.timer);
  }

  /** Open for as long as there is nothing else to read; after that the reader opens and closes it. */
  renderThinking() {
    const { thinking, thinking_seconds: time, content } = this.message;
    if (!thinking) return;
    const isAll = content === "";
    if (!this.thinking) {
      this.thoughts = element("div", { class: "thoughts" });
      this.summary = element("summary");
      this.thinking = element("details", { class: "thinking", open: isAll }, this.summary, this.thoughts);
      this.body.before(this.thinking);
    } else if (this.wasAll && !isAll) this.thinking.open = false;
    this.wasAll = isAll;
    this.summary.textContent = isAll && this.message.state === "streaming" ? "Thinking…" : `Thinking, ${seconds(time)}`;
    renderMarkdown(this.thoughts, thinking);
  }
}

function statusText(message) {
  const { state, timings } = message;
  if (state === "waiting" && !message.sent) return "Not sent yet: it waits in this browser until another answer ends.";
  if (state === "waiting") return `Waiting for the first token, ${seconds((Date.now() - message.sent) / 1000)}`;
  if (state === "streaming") return message.content ? "Writing…" : "Thinking…";
  if (state === "failed") return message.error ?? "It failed.";
  const parts = [STATES[state], message.finish_reason === "length" && "Cut at the most tokens allowed."];
  if (timings) {
    const numPromptTokens = timings.cache_n + timings.prompt_n;
    parts.push(
      `First token ${seconds(timings.ttft_ms / 1000)}`,
      timings.predicted_n > 1 && `${rate(timings.predicted_per_second)} tokens/s`,
      `${timings.predicted_n} tokens`,
      `${timings.cache_n} of ${numPromptTokens} prompt tokens cached`,
    );
  }
  return parts.filter(Boolean).join(" · ");
}

function timingsTitle(timings) {
  const delivery = timings.ttft_ms - timings.front_end_ms - timings.queue_ms - timings.prompt_ms;
  const stages = [
    ["front end", timings.front_end_ms],
    ["queue", timings.queue_ms],
    ["prefill", timings.prompt_ms],
    ["delivery", delivery],
    ["decode", timings.predicted_ms],
    ["in all", timings.total_ms],
  ];
  return stages.map(([name, milliseconds]) => `${name} ${seconds(milliseconds / 1000)}`).join("\n");
}
