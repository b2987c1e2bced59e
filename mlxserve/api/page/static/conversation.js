// A chat that asks: one answer at a time, whether or not anybody looks at it.

import { streamChat } from "./api.js";

/** Events: "update" when the messages changed, "running" when an answer began or ended. */
export class Conversation extends EventTarget {
  constructor(chat, store) {
    super();
    this.chat = chat;
    this.store = store;
    this.stopper = null;
  }

  get isRunning() {
    return this.stopper !== null;
  }

  get canRegenerate() {
    return !this.isRunning && this.chat.messages.at(-1)?.role === "assistant";
  }

  async ask(text) {
    if (this.isRunning || !text.trim()) return;
    this.chat.messages.push({ role: "user", content: text });
    this.store.changed();
    await this.answer();
  }

  async regenerate() {
    if (!this.canRegenerate) return;
    this.chat.messages.pop();
    await this.answer();
  }

  stop() {
    this.stopper?.abort("stopped");
  }

  /** The page goes away: what there is of the answer is kept now, there is no later. */
  interrupt() {
    if (!this.isRunning) return;
    this.chat.messages.at(-1).state = "interrupted";
    this.store.save(this.chat);
    this.stopper.abort("interrupted");
  }

  async answer() {
    const { chat, store } = this;
    const body = { model: chat.model, messages: chat.history, ...chat.fields };
    const message = { role: "assistant", thinking: "", content: "", state: "waiting", model: chat.model };
    let began = null;
    chat.messages.push(message);
    this.stopper = new AbortController();
    store.save(chat);
    this.dispatchEvent(new Event("running"));
    this.dispatchEvent(new Event("update"));
    try {
      for await (const chunk of streamChat(body, this.stopper.signal, () => (message.sent = Date.now()))) {
        const choice = chunk.choices[0];
        const { reasoning_content: thought, content } = choice?.delta ?? {};
        if (thought) {
          began ??= performance.now();
          message.thinking += thought;
        }
        if (thought || content) {
          message.state = "streaming";
          // Kept up to date, as a thought may be cut off at any moment.
          if (began !== null && message.content === "") message.thinking_seconds = (performance.now() - began) / 1000;
        }
        if (content) message.content += content;
        if (choice?.finish_reason) message.finish_reason = choice.finish_reason;
        if (chunk.timings) message.timings = chunk.timings;
        store.saveSoon(chat);
        this.dispatchEvent(new Event("update"));
      }
      message.state = "done";
    } catch (error) {
      message.state = this.stopper.signal.aborted ? this.stopper.signal.reason : "failed";
      if (message.state === "failed") message.error = error.message;
    }
    this.stopper = null;
    store.save(chat);
    this.dispatchEvent(new Event("update"));
    this.dispatchEvent(new Event("running"));
  }
}
