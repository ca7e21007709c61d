// Small things about elements and numbers. Text only ever enters through textContent.

export const byId = (id) => document.getElementById(id);

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function setText(id, text) {
  const found = byId(id);
  if (found.textContent !== text) found.textContent = text;
}

// The value of a colour of the stylesheet, as the canvas needs it.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const count = (value) => Math.round(value).toLocaleString("en-US");

export function rate(value) {
  return value >= 100 || value === 0 ? count(value) : value.toFixed(1);
}

export function seconds(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 0.995) return `${Math.round(value * 1000)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(value < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

export const percent = (share) => `${(share * 100).toFixed(share && share < 0.1 ? 1 : 0)} %`;

// A coloured square, a name and a figure.
export function legendEntry(colourName, name, figure) {
  const entry = element("li");
  const swatch = element("span", "swatch");
  swatch.style.background = `var(--${colourName})`;
  entry.append(swatch, `${name} `, element("b", "", figure));
  return entry;
}
