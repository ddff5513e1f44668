/** @file Finds and makes elements. Text only ever becomes text: nothing here or elsewhere parses markup. */

/**
 * Returns the page's element with this id.
 * @template {Element} T
 * @param {string} id
 * @param {new () => T} type the class it must have
 * @returns {T}
 */
export function byId(id, type) {
  const found = document.getElementById(id);
  if (!(found instanceof type)) throw new Error(`the page has no ${type.name} #${id}`);
  return found;
}

/**
 * Makes an element.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string>} [attributes]
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/**
 * Makes a button that does something.
 * @param {string} label
 * @param {() => void} onClick
 * @param {Record<string, string>} [attributes]
 */
export function makeButton(label, onClick, attributes = {}) {
  const button = make("button", { type: "button", ...attributes }, label);
  button.addEventListener("click", onClick);
  return button;
}

/**
 * Tells a screen reader something, once.
 * @param {string} text
 */
export function announce(text) {
  byId("announcer", HTMLElement).textContent = text;
}
