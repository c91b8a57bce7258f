// Elements, and numbers for people.
const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function scaled(value, units, step) {
  let at = 0;
  while (Math.abs(value) >= step && at < units.length - 1) { value /= step; at += 1; }
  const digits = value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}${units[at]}`;
}

export const bytes = (value) => scaled(value, [" B", " kB", " MB", " GB", " TB", " PB"], 1000);
export const count = (value) => scaled(value, ["", "K", "M", "B", "T"], 1000);
export const seconds = (value) => (value < 0.1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toFixed(2)} s`);

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
