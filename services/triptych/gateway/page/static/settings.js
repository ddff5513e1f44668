/** @file The settings: how to look, how to sample, who goes first. Kept in this browser; the key in this tab only. */

import { byId } from "./dom.js";

const STORE = "triptych.settings";

/**
 * @typedef {object} Settings
 * @property {string} detail high, medium, low or thumbnail
 * @property {number} temperature
 * @property {number | undefined} maxTokens undefined: the server's default
 * @property {string} priority interactive, standard or economy
 * @property {string} key the API key; empty: none
 */

/** The settings dialog, and the values in it. */
export class SettingsPanel {
  constructor() {
    this.dialog = byId("settings", HTMLDialogElement);
    this.detail = byId("detail", HTMLSelectElement);
    this.temperature = byId("temperature", HTMLInputElement);
    this.maxTokens = byId("maxTokens", HTMLInputElement);
    this.priority = byId("priority", HTMLSelectElement);
    this.key = byId("key", HTMLInputElement);
    const kept = recall(localStorage);
    choose(this.detail, kept.detail);
    choose(this.priority, kept.priority);
    this.temperature.value = kept.temperature ?? "0";
    this.maxTokens.value = kept.maxTokens ?? "";
    this.key.value = recall(sessionStorage).key ?? "";
    this.dialog.addEventListener("change", () => this.#keep());
    byId("show-settings", HTMLButtonElement).addEventListener("click", () => this.dialog.showModal());
  }

  /** @returns {Settings} */
  get values() {
    return {
      detail: this.detail.value,
      temperature: this.temperature.checkValidity() ? this.temperature.valueAsNumber : 0,
      maxTokens: this.maxTokens.value && this.maxTokens.checkValidity() ? this.maxTokens.valueAsNumber : undefined,
      priority: this.priority.value,
      key: this.key.value.trim(),
    };
  }

  #keep() {
    const { detail, temperature, maxTokens, priority, key } = this;
    const values = { detail, temperature, maxTokens, priority };
    remember(localStorage, Object.fromEntries(Object.entries(values).map(([name, field]) => [name, field.value])));
    remember(sessionStorage, { key: key.value });
  }
}

/**
 * @param {HTMLSelectElement} select
 * @param {string | undefined} value
 */
function choose(select, value) {
  if ([...select.options].some((option) => option.value === value)) select.value = value ?? "";
}

/**
 * @param {Storage} storage
 * @returns {Record<string, string | undefined>}
 */
function recall(storage) {
  try {
    return JSON.parse(storage.getItem(STORE) ?? "{}");
  } catch {
    return {};
  }
}

/**
 * @param {Storage} storage
 * @param {Record<string, string>} values
 */
function remember(storage, values) {
  try {
    storage.setItem(STORE, JSON.stringify(values));
  } catch {
    // A browser that keeps nothing still has them until the page closes.
  }
}
