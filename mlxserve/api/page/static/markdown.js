// Markdown to elements: the blocks. Nothing here parses HTML: what a model writes becomes text nodes, so that a tag in
// an answer is shown, never obeyed. The page's Content-Security-Policy would not let a string become HTML either.

import { copyButton, element } from "./dom.js";
import { appendInline } from "./markdown_inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])([ \t]+)(\S.*)?$/;
const TABLE_RULE = /^ *\|?(?: *:?-+:? *\|)+ *(?::?-+:? *)?$/;

const MAX_DEPTH = 12;

/**
 * Shows `text` in `container`. Called again with more text, it replaces only the blocks that changed, so that a long
 * answer streams without redrawing, and a selection in its finished part stays.
 */
export function renderMarkdown(container, text) {
  const blocks = parseBlocks(text.replace(/\r\n?/g, "\n").split("\n"));
  blocks.forEach((block, index) => {
    const shown = container.children[index];
    const before = shown && sources.get(shown);
    if (before?.source === block.source) return;
    sources.set(
      before?.kind === "code" && block.kind === "code" && before.language === block.language
        ? updateCode(shown, block)
        : place(container, shown, buildBlock(block, 0)),
      block,
    );
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

const sources = new WeakMap();

function place(container, shown, node) {
  if (shown) shown.replaceWith(node);
  else container.append(node);
  return node;
}

/** The blocks of some lines, each with its `kind`, its `source`, and what building it needs. */
export function parseBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = readBlock(lines, at);
    blocks.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

function readBlock(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] ?? "" }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return readQuote(lines, at);
  if (ITEM.test(line)) return readList(lines, at);
  if (startsTable(lines, at)) return readTable(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((each) => each.trim()).join("\n") }, end];
}

function startsBlock(lines, at) {
  const line = lines[at];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line)) || startsTable(lines, at);
}

function startsTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1]);
}

/** Without its closing fence a code block reaches to the end: it is still being written. */
function readCode(lines, at, [line, fence, info]) {
  const indent = line.indexOf(fence[0]);
  const body = [];
  for (let end = at + 1; end < lines.length; end += 1) {
    const close = FENCE.exec(lines[end]);
    if (close && close[1].startsWith(fence) && !close[2].trim()) {
      return [{ kind: "code", language: info.trim().split(" ")[0], text: body.join("\n") }, end + 1];
    }
    body.push(dedent(lines[end], indent));
  }
  return [{ kind: "code", language: info.trim().split(" ")[0], text: body.join("\n") }, lines.length];
}

function readQuote(lines, at) {
  const body = [];
  let end = at;
  for (; end < lines.length && QUOTE.test(lines[end]); end += 1) body.push(QUOTE.exec(lines[end])[1]);
  return [{ kind: "quote", lines: body }, end];
}

/** Models indent nested lists by two, three or four spaces; whatever stands deeper than its item belongs to it. */
function readList(lines, at) {
  const [, , marker] = ITEM.exec(lines[at]);
  const base = indentOf(lines[at]);
  const ordered = /\d/.test(marker);
  const isSibling = (line) => {
    const item = ITEM.exec(line);
    return item !== null && /\d/.test(item[2]) === ordered && Math.abs(indentOf(line) - base) < 2 && !RULE.test(line);
  };
  const items = [];
  let width = 0;
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      const next = firstNotBlank(lines, end);
      if (next === lines.length || (indentOf(lines[next]) < base + 2 && !isSibling(lines[next]))) break;
      items.at(-1).push(...lines.slice(end, next).map(() => ""));
      end = next;
      continue;
    }
    if (indentOf(line) >= base + 2) items.at(-1).push(dedent(line, width));
    else if (isSibling(line)) {
      const item = ITEM.exec(line);
      width = base + item[2].length + Math.min(item[3].length, 4);
      items.push([item[4] ?? ""]);
    } else if (lines[end - 1].trim() && !startsBlock(lines, end)) items.at(-1).push(line.trim());
    else break;
    end += 1;
  }
  return [{ kind: "list", ordered, start: ordered ? Number.parseInt(marker, 10) : 1, items }, end];
}

function firstNotBlank(lines, at) {
  while (at < lines.length && !lines[at].trim()) at += 1;
  return at;
}

/** In columns; a tab counts for four. */
function indentOf(line) {
  const [indent] = /^[ \t]*/.exec(line);
  return indent.length + 3 * (indent.split("\t").length - 1);
}

/** Takes up to `width` columns of indentation away. */
function dedent(line, width) {
  let at = 0;
  for (let column = 0; column < width && /[ \t]/.test(line[at] ?? ""); at += 1) column += line[at] === "\t" ? 4 : 1;
  return line.slice(at);
}

function readTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const align = cells(lines[at + 1]).map((rule) => (/^:.*:$/.test(rule) ? "center" : rule.endsWith(":") ? "right" : "left"));
  return [{ kind: "table", header: cells(lines[at]), align, rows: lines.slice(at + 2, end).map(cells) }, end];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\\\|/g, "\u0000").replace(/\|$/, "");
  return inner.split("|").map((cell) => cell.replaceAll("\u0000", "|").trim());
}

function buildBlock(block, depth) {
  switch (block.kind) {
    case "code":
      return buildCode(block);
    case "heading":
      // The page's own headings end at level 2.
      return appendInline(element(`h${Math.min(6, block.level + 2)}`), block.text);
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, buildNested(block.lines, depth));
    case "list":
      return element(
        block.ordered ? "ol" : "ul",
        { start: block.start === 1 ? null : block.start },
        block.items.map((item) => element("li", {}, buildNested(item, depth))),
      );
    case "table":
      return buildTable(block);
    default:
      return appendInline(element("p"), block.text);
  }
}

/** Quotes and list items hold blocks; a single paragraph among them needs no element of its own. */
function buildNested(lines, depth) {
  if (depth >= MAX_DEPTH) return [lines.join("\n")];
  const blocks = parseBlocks(lines);
  return blocks.map((block, index) =>
    index === 0 && block.kind === "paragraph" && !lines.includes("")
      ? appendInline(document.createDocumentFragment(), block.text)
      : buildBlock(block, depth + 1),
  );
}

function buildTable({ header, align, rows }) {
  const row = (tag, each) => header.map((_, column) => appendInline(element(tag, { class: align[column] ?? "left" }), each[column] ?? ""));
  return element(
    "div",
    { class: "table", tabindex: 0, role: "group", "aria-label": "Table" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, row("th", header))),
      element("tbody", {}, rows.map((each) => element("tr", {}, row("td", each)))),
    ),
  );
}

function buildCode({ language, text }) {
  const code = element("code", {}, text);
  return element(
    "div",
    { class: "code" },
    element("div", { class: "code-head" }, element("span", {}, language || "text"), copyButton(() => code.textContent)),
    element("pre", { tabindex: 0 }, code),
  );
}

function updateCode(shown, { text }) {
  shown.querySelector("code").textContent = text;
  return shown;
}
