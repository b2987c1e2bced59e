// A chat as a file.

import { element } from "./dom.js";

export function saveMarkdown(chat) {
  save(chat, toMarkdown(chat), "text/markdown", "md");
}

export function saveJson(chat) {
  save(chat, JSON.stringify(chat, null, 2) + "\n", "application/json", "json");
}

export function toMarkdown(chat) {
  const settings = Object.entries({ model: chat.model, ...chat.parameters }).map(([name, value]) => `${name}: ${value}`);
  const parts = [`# ${chat.title}`, settings.join(", ")];
  if (chat.system.trim()) parts.push("## System", chat.system.trim());
  for (const message of chat.messages) {
    parts.push(message.role === "user" ? "## You" : `## ${message.model ?? "Answer"}`);
    if (message.thinking?.trim()) parts.push(quote(`**Thinking**\n\n${message.thinking.trim()}`));
    if (message.content.trim()) parts.push(message.content.trim());
    if (message.state && message.state !== "done") parts.push(`*(${message.error ?? message.state})*`);
  }
  return parts.join("\n\n") + "\n";
}

function quote(text) {
  return text
    .split("\n")
    .map((line) => `> ${line}`.trimEnd())
    .join("\n");
}

function save(chat, text, type, extension) {
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "") || "chat";
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: `${name}.${extension}` }).click();
  // The download reads the address after this function has returned.
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
