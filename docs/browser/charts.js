// Pictures as SVG, with text alternatives. Colours are classes of style.css.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 22;
const KINDS = { state: "state", gradients: "gradients", activations: "activations", working: "working memory" };

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function drawing(width, height, label) {
  return shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

/** The total as one stacked bar over the capacity, if there is one; below it each part, over the largest. parts: {name, value, text, kind}. */
export function bars(place, title, parts, total, capacity) {
  place.replaceChildren();
  if (!parts.length) return;
  const width = widthOf(place);
  const label = 118, number = 88, room = width - label - number;
  const most = Math.max(total.value, capacity?.value ?? 0), largest = Math.max(...parts.map((part) => part.value));
  const top = capacity ? 2 * ROW : ROW;
  const svg = drawing(width, top + 14 + parts.length * ROW, `${title}: ${total.text}${capacity ? ` of ${capacity.text}` : ""}`);
  const x = (value) => label + (value / most) * room;
  svg.append(shape("text", { x: 0, y: 16, class: "strong" }, "total"));
  let from = 0;
  for (const part of parts) {
    const bar = shape("rect", { x: x(from), y: 4, width: Math.max(0, x(from + part.value) - x(from)), height: 16, class: `bar ${part.kind}` });
    bar.append(shape("title", {}, `${words(part.name)} ${part.text}`));
    svg.append(bar);
    from += part.value;
  }
  svg.append(shape("text", { x: width, y: 16, class: "number strong" }, total.text));
  if (capacity) {
    svg.append(shape("line", { x1: x(capacity.value), x2: x(capacity.value), y1: 0, y2: 26, class: "limit" }));
    const side = capacity.value < most / 2 ? "soft" : "number soft";
    svg.append(shape("text", { x: x(capacity.value), y: 40, class: side }, `a step may take ${capacity.text}`));
  }
  // From the largest down: which part to attack first.
  [...parts].sort((a, b) => b.value - a.value).forEach((part, place) => {
    const y = top + 14 + place * ROW;
    const row = shape("g", { "data-name": part.name, "data-value": part.value });
    row.append(
      shape("text", { x: 0, y: y + 14 }, words(part.name)),
      shape("rect", { x: label, y: y + 2, width: Math.max(1, (part.value / largest) * room), height: 14, class: `bar ${part.kind}` }),
      shape("text", { x: width, y: y + 14, class: "number" }, part.text),
    );
    svg.append(row);
  });
  const kinds = Object.entries(KINDS).filter(([kind]) => parts.some((part) => part.kind === kind));
  const key = kinds.map(([kind, text]) => element("span", { class: kind }, text));
  place.append(element("h3", {}, title), ...(key.length ? [element("p", { class: "key", "aria-hidden": "true" }, ...key)] : []), svg);
}

function widthOf(place) {
  return Math.max(280, Math.min(place.clientWidth || 640, 760));
}

/** Speed over memory of all candidates, the best ones numbered as in the table. points: [share of capacity, tokens/s/GPU]. */
export function cloud(place, points, numbered) {
  place.replaceChildren();
  const width = widthOf(place), height = 300, left = 56, bottom = 44, top = 14;
  const fastest = Math.max(...points.map((point) => point[1]));
  const step = tidy(fastest / 4), most = step * Math.ceil(fastest / step);
  const x = (share) => left + share * (width - left - 20);
  const y = (speed) => height - bottom - (speed / most) * (height - bottom - top);
  const svg = drawing(width, height, `Predicted speed over memory of ${points.length} layouts; the fastest makes ${Math.round(fastest)} tokens/s/GPU.`);
  for (let speed = 0; speed <= most; speed += step) {
    svg.append(shape("line", { x1: left, x2: width - 20, y1: y(speed), y2: y(speed), class: "rule" }));
    svg.append(shape("text", { x: left - 8, y: y(speed) + 4, class: "number soft" }, speed.toLocaleString("en")));
  }
  for (const percent of [0, 25, 50, 75, 100]) {
    svg.append(shape("text", { x: x(percent / 100), y: height - bottom + 18, class: "middle soft" }, `${percent}%`));
  }
  svg.append(shape("text", { x: left, y: height - 6, class: "soft" }, "share of the capacity"));
  // One path of dots without length: thousands of elements would be slow.
  svg.append(shape("path", { d: points.map(([share, speed]) => `M${x(share).toFixed(1)} ${y(speed).toFixed(1)}h0`).join(""), class: "dots" }));
  points.slice(0, numbered).forEach(([share, speed], place) => {
    const dot = shape("circle", { cx: x(share), cy: y(speed), r: 4, class: "best" });
    dot.append(shape("title", {}, `${place + 1}: ${Math.round(speed)} tokens/s/GPU at ${Math.round(share * 100)}% of the capacity`));
    svg.append(dot);
  });
  place.append(element("h3", {}, "Predicted tokens/s/GPU over memory"), svg);
}

function tidy(about) {
  const power = 10 ** Math.floor(Math.log10(about));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= about);
}

function words(name) {
  return name.replaceAll("_", " ").replace("activations.", "");
}
