// Building elements without ever parsing HTML: text is always text.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes: functions are listeners, null and false are left out, true is an empty attribute. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** One of the page's icons, drawn on a 24 x 24 grid with strokes. */
export function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" },
    ICONS[name].map((d) => svg("path", { d })),
  );
}

/** A button that shows only an icon; its label is read and shown as a tooltip. */
export function iconButton(name, label, click, attributes = {}) {
  return element("button", { type: "button", class: "icon-button", "aria-label": label, title: label, click, ...attributes }, icon(name));
}

const ICONS = {
  plus: ["M12 5v14", "M5 12h14"],
  close: ["M6 6l12 12", "M18 6L6 18"],
  send: ["M12 20V5", "M5 12l7-7 7 7"],
  stop: ["M7 7h10v10H7z"],
  again: ["M4 12a8 8 0 1 0 2.5-5.8", "M4 4v4.5h4.5"],
  copy: ["M9 9h11v11H9z", "M15 9V4H4v11h5"],
  bin: ["M4 7h16", "M9 7V4h6v3", "M6 7l1 13h10l1-13"],
  sliders: ["M4 7h9", "M19 7h1", "M16 4.5v5", "M4 17h1", "M11 17h9", "M8 14.5v5"],
  beside: ["M4 5h16v14H4z", "M12 5v14"],
  save: ["M12 4v11", "M7 11l5 5 5-5", "M5 20h14"],
  menu: ["M4 7h16", "M4 12h16", "M4 17h16"],
  key: ["M4 16a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M11 13l9-9", "M16 8l3 3"],
  moon: ["M19 14.5A8 8 0 1 1 9.5 5a6.5 6.5 0 0 0 9.5 9.5z"],
  sun: ["M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z", "M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M19 5l-1.5 1.5M6.5 17.5L5 19"],
};

/** Copies text; also where the page comes over plain HTTP from another machine and there is no clipboard API. */
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = element("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `text()` gives and says so for a moment. */
export function copyButton(text) {
  const label = element("span", {}, "Copy");
  const button = element("button", { type: "button", class: "small-button", click: copy }, icon("copy"), label);
  async function copy() {
    try {
      await copyText(text());
      label.textContent = "Copied";
    } catch {
      label.textContent = "Not allowed";
    }
    setTimeout(() => (label.textContent = "Copy"), 1500);
  }
  return button;
}
