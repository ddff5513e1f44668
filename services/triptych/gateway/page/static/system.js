/** @file The live view: who answers, what waits and runs, how full the KV cache is. */

import { byId } from "./dom.js";

const POLL_MS = 1000;
const SAMPLES = 60;

/**
 * What `ui/state.json` says (see page/view.py).
 * @typedef {object} SystemState
 * @property {boolean} ready
 * @property {number} in_flight
 * @property {WorkerState | null} worker
 * @property {boolean} worker_known
 *
 * @typedef {object} WorkerState
 * @property {number} waiting
 * @property {number} running
 * @property {number} total_blocks
 * @property {number} used_blocks
 * @property {number} cached_blocks
 */

/** Polls the state while somebody looks, and draws it. */
export class SystemPanel {
  /** @param {(ready: boolean) => void} onHealth called after each look */
  constructor(onHealth) {
    this.onHealth = onHealth;
    /** @type {{running: number, waiting: number}[]} */
    this.samples = [];
    const toggle = byId("show-system", HTMLButtonElement);
    toggle.addEventListener("click", () => {
      const open = document.body.classList.toggle("with-system");
      toggle.setAttribute("aria-expanded", String(open));
    });
    document.addEventListener("visibilitychange", () => this.#look());
    this.#look();
  }

  /**
   * Counts where pictures came from.
   * @param {import("./api.js").ImageReport[]} images
   */
  count(images) {
    for (const { source } of images) {
      const cell = document.getElementById(`from-${source}`);
      if (cell) cell.textContent = String(Number(cell.textContent) + 1);
    }
  }

  async #look() {
    clearTimeout(this.timer);
    if (document.hidden || this.looking) return;
    this.looking = true;
    try {
      const response = await fetch("ui/state.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (!response.ok) throw new Error(`status ${response.status}`);
      this.#draw(await response.json());
    } catch {
      this.#drawLost();
    } finally {
      this.looking = false;
      this.timer = setTimeout(() => this.#look(), POLL_MS);
    }
  }

  /** @param {SystemState} state */
  #draw({ ready, in_flight, worker, worker_known }) {
    let words = ready
      ? "Ready: pictures and text are answered."
      : "Not ready: the router or a service behind it is missing.";
    if (!worker && worker_known) words = "The worker does not answer.";
    if (!worker && !worker_known) words += " The worker’s address is not known to this gateway.";
    say("system-state", words);
    say("in-flight", String(in_flight));
    say("waiting", worker ? String(worker.waiting) : "–");
    say("running", worker ? String(worker.running) : "–");
    this.#drawBlocks(worker);
    this.samples.push({ running: worker?.running ?? 0, waiting: worker?.waiting ?? 0 });
    this.samples.splice(0, this.samples.length - SAMPLES);
    this.#drawHistory();
    this.onHealth(ready);
  }

  #drawLost() {
    say("system-state", "The gateway does not answer. Is “triptych up” still running?");
    for (const id of ["in-flight", "waiting", "running"]) say(id, "–");
    this.#drawBlocks(null);
    this.onHealth(false);
  }

  /** @param {WorkerState | null} worker */
  #drawBlocks(worker) {
    const { total_blocks: total, used_blocks: used, cached_blocks: cached } = worker ?? NO_BLOCKS;
    const share = (/** @type {number} */ blocks) => (total ? `${((100 * blocks) / total).toFixed(2)}%` : "0");
    const words = (/** @type {number} */ blocks) => (worker ? blocks.toLocaleString("en") : "–");
    say("kv-used", words(used));
    say("kv-cached", words(cached));
    say("kv-free", worker ? `${words(total - used - cached)} of ${words(total)}` : "–");
    for (const [name, blocks] of Object.entries({ used, cached })) {
      const bar = document.querySelector(`#kv .${name}`);
      if (bar instanceof HTMLElement) bar.style.width = share(blocks);
    }
  }

  #drawHistory() {
    const top = Math.max(4, ...this.samples.map(({ running, waiting }) => running + waiting));
    const from = SAMPLES - this.samples.length;
    /** @param {(sample: {running: number, waiting: number}) => number} height */
    const area = (height) => {
      const steps = this.samples.map(
        (sample, index) => `L${from + index} ${y(height(sample))}L${from + index + 1} ${y(height(sample))}`,
      );
      return `M${from} 24${steps.join("")}L${SAMPLES} 24Z`;
    };
    const y = (/** @type {number} */ count) => (24 - (23 * count) / top).toFixed(2);
    const history = byId("history", SVGElement);
    history.querySelector(".waited")?.setAttribute(
      "d",
      area(({ running, waiting }) => running + waiting),
    );
    history.querySelector(".ran")?.setAttribute(
      "d",
      area(({ running }) => running),
    );
    const most = Math.max(0, ...this.samples.map(({ running }) => running));
    history.setAttribute("aria-label", `Requests over the last minute: at most ${most} running at once.`);
  }
}

const NO_BLOCKS = { total_blocks: 0, used_blocks: 0, cached_blocks: 0 };

/**
 * @param {string} id
 * @param {string} text
 */
function say(id, text) {
  const element = byId(id, HTMLElement);
  if (element.textContent !== text) element.textContent = text;
}
