// Markdown to elements: what stands within a line.

import { element } from "./dom.js";

const SAFE_SCHEMES = new Set(["http:", "https:", "mailto:"]);
const BARE_URL = /^https?:\/\/[^\s<>"'`|\\^{}[\]]+/;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

// In this order: the longer delimiter first.
const EMPHASIS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "s"],
  ["*", "em"],
  ["_", "em"],
];

const MAX_DEPTH = 8;
const MAX_LABEL = 500;

/** Appends `text` to `parent`, with its marks as elements; gives `parent`. */
export function appendInline(parent, text, depth = 0) {
  let plain = "";
  // What has been looked for to the end in vain; without it a hostile text takes quadratic time.
  const missing = new Set();
  const flush = () => {
    if (plain) parent.append(plain);
    plain = "";
  };
  for (let at = 0; at < text.length; ) {
    const found = depth < MAX_DEPTH && readMark(text, at, missing, depth);
    if (found?.text !== undefined) plain += found.text;
    else if (found) {
      flush();
      parent.append(found.node);
    } else plain += text[at];
    at = found ? found.end : at + 1;
  }
  flush();
  return parent;
}

/** The mark that begins at `at`: {node or text, end}; null if none does. */
function readMark(text, at, missing, depth) {
  switch (text[at]) {
    case "\n":
      return { node: element("br"), end: at + 1 };
    case "\\":
      return PUNCTUATION.test(text[at + 1] ?? "") ? { text: text[at + 1], end: at + 2 } : null;
    case "`":
      return readCode(text, at, missing);
    case "!":
      return text[at + 1] === "[" ? readLink(text, at + 1, depth) : null;
    case "[":
      return readLink(text, at, depth);
    case "<":
    case "h":
      return readBareUrl(text, at);
    case "*":
    case "_":
    case "~":
      return readEmphasis(text, at, missing, depth);
    default:
      return null;
  }
}

function readCode(text, at, missing) {
  const ticks = /^`+/.exec(text.slice(at, at + 64))[0];
  const end = closingTicks(text, at + ticks.length, ticks, missing);
  if (end < 0) return { text: ticks, end: at + ticks.length };
  const inner = text.slice(at + ticks.length, end).replace(/\n/g, " ");
  const code = /^ .*[^ ].* $/.test(inner) ? inner.slice(1, -1) : inner;
  return { node: element("code", {}, code), end: end + ticks.length };
}

function closingTicks(text, from, ticks, missing) {
  if (missing.has(ticks)) return -1;
  for (let at = text.indexOf(ticks, from); at >= 0; ) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === ticks.length) return at;
    at = text.indexOf(ticks, end);
  }
  missing.add(ticks);
  return -1;
}

/** Pictures become links to them: the page loads nothing from elsewhere. */
function readLink(text, at, depth) {
  const length = text.slice(at, at + MAX_LABEL).indexOf("](");
  if (length < 0) return null;
  const middle = at + length;
  const label = text.slice(at + 1, middle);
  if (label.includes("[")) return null;
  const target = /^\(\s*(?:<([^<>\n]{0,2000})>|((?:[^\s()]|\([^\s()]{0,500}\)){0,2000}))(?:\s+"[^"\n]{0,500}")?\s*\)/.exec(text.slice(middle + 1, middle + 3000));
  if (!target) return null;
  const end = middle + 1 + target[0].length;
  const url = safeUrl(target[1] ?? target[2]);
  const node = url ? link(url) : element("span", { class: "dead-link", title: "This address is not opened from here" });
  return { node: appendInline(node, label || (url ?? "link"), depth + 1), end };
}

function readBareUrl(text, at) {
  const start = text[at] === "<" ? at + 1 : at;
  if (start === at && WORD.test(text[at - 1] ?? "")) return null;
  const match = BARE_URL.exec(text.slice(start, start + 2000));
  if (!match) return null;
  if (start > at) {
    const end = start + match[0].length;
    const url = text[end] === ">" && safeUrl(match[0]);
    return url ? { node: link(url, match[0]), end: end + 1 } : null;
  }
  let shown = match[0].replace(/[.,;:!?*_~]+$/, "");
  if (shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
  const url = safeUrl(shown);
  return url ? { node: link(url, shown), end: start + shown.length } : null;
}

/** The address, if it is absolute and of a scheme that runs nothing; null otherwise. */
export function safeUrl(address) {
  try {
    const url = new URL(address);
    return SAFE_SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(url, ...children) {
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, children);
}

function readEmphasis(text, at, missing, depth) {
  const [mark, tag] = EMPHASIS.find(([each]) => text.startsWith(each, at)) ?? [];
  if (!mark) return null;
  const run = { text: mark, end: at + mark.length };
  const next = text[at + mark.length] ?? " ";
  if (/\s/.test(next) || (mark[0] === "_" && WORD.test(text[at - 1] ?? ""))) return run;
  const end = closingMark(text, at + mark.length, mark, missing);
  if (end < 0) return run;
  const node = appendInline(element(tag), text.slice(at + mark.length, end), depth + 1);
  return { node, end: end + mark.length };
}

function closingMark(text, from, mark, missing) {
  if (missing.has(mark)) return -1;
  for (let at = from; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "`") {
      const found = readCode(text, at, missing);
      at = found.end - 1;
    } else if (text[at] === mark[0]) {
      let end = at;
      while (text[end] === mark[0]) end += 1;
      const closes = !/\s/.test(text[at - 1]) && at > from && (mark[0] !== "_" || !WORD.test(text[end] ?? ""));
      // A run of three closes both of "***both***"; the inner one takes its part first.
      if (closes && (end - at === mark.length || end - at === 3)) return end - mark.length;
      at = end - 1;
    }
  }
  missing.add(mark);
  return -1;
}
