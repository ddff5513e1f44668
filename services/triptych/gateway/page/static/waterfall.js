/** @file Draws where an answer's time went: one bar per stage on a common time axis. */

import { make } from "./dom.js";
import { duration } from "./words.js";

/** Stages in their order, and what each does. @type {[string, string][]} */
const STAGES = [
  ["intake", "Checking the request and reading the pictures’ headers (router)"],
  ["preprocess", "Decoding, resizing and hashing the pictures (router)"],
  ["encode", "Turning pictures into features: vision transformer and projector (Triton)"],
  ["queue", "Waiting for a place in the worker’s batch"],
  ["prefill", "Reading the prompt, pictures included (worker)"],
  ["decode", "Writing the answer, one token per step (worker)"],
];

/**
 * @typedef {object} Bar
 * @property {string} stage
 * @property {string} meaning
 * @property {number} startS
 * @property {number} endS
 */

/**
 * Places the stages on the time axis. The gateway reports durations: the router's stages follow each other from the
 * start, the worker's are set around the first token, which ends prefill.
 * @param {Record<string, number>} timings seconds
 * @returns {{bars: Bar[], firstTokenS: number, totalS: number}}
 */
export function place(timings) {
  const { queue = 0, prefill = 0, decode = 0, intake = 0, preprocess = 0, encode = 0 } = timings;
  const routerEndS = intake + preprocess + encode;
  const firstTokenS = Math.max(timings.time_to_first_token ?? 0, routerEndS + queue + prefill);
  /** @type {Record<string, number>} */
  const starts = {
    intake: 0,
    preprocess: intake,
    encode: intake + preprocess,
    queue: firstTokenS - prefill - queue,
    prefill: firstTokenS - prefill,
    decode: firstTokenS,
  };
  const bars = STAGES.filter(([stage]) => timings[stage] !== undefined).map(([stage, meaning]) => ({
    stage,
    meaning,
    startS: starts[stage],
    endS: starts[stage] + timings[stage],
  }));
  return { bars, firstTokenS, totalS: Math.max(timings.total ?? 0, firstTokenS + decode) };
}

/**
 * Returns round times for the axis: at most five, from 0 to below the total.
 * @param {number} totalS
 * @returns {number[]}
 */
export function ticks(totalS) {
  const raw = totalS / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const stepS = power * ([1, 2, 5].find((factor) => factor * power >= raw) ?? 10);
  const times = [];
  for (let index = 0; index * stepS < totalS * 0.95; index++) times.push(index * stepS);
  return times;
}

/**
 * Draws the waterfall as a table, so that it reads well without eyes.
 * @param {Record<string, number>} timings seconds
 * @param {boolean} cached whether all pictures came from a cache, so that no encoding was needed
 * @returns {HTMLTableElement}
 */
export function drawWaterfall(timings, cached) {
  const { bars, firstTokenS, totalS } = place(timings);
  const percent = (/** @type {number} */ seconds) => `${((100 * seconds) / totalS).toFixed(2)}%`;
  const axis = make("div", { class: "axis", "aria-hidden": "true" });
  for (const time of ticks(totalS)) {
    const tick = make("span", {}, time ? duration(time).replace(/\.0+(?= )/, "") : "0");
    tick.style.left = percent(time);
    axis.append(tick);
  }
  const rows = bars.map(({ stage, meaning, startS, endS }) => {
    const bar = make("div", { class: `span ${stage}` });
    bar.style.left = percent(startS);
    bar.style.width = percent(endS - startS);
    return row(stage, meaning, make("div", { class: "track" }, bar), duration(endS - startS));
  });
  if (cached && timings.encode === undefined) {
    const after = bars.findIndex(({ stage }) => stage === "queue" || stage === "prefill");
    const note = make("div", { class: "track skipped" }, make("span", {}, "not needed: cached"));
    rows.splice(after < 0 ? rows.length : after, 0, row("encode", STAGES[2][1], note, "–"));
  }
  const table = make(
    "table",
    { class: "waterfall" },
    make("caption", { class: "unseen" }, "Where the time went"),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        make("th", { scope: "col" }, make("span", { class: "unseen" }, "Stage")),
        make("td", {}, axis),
        make("th", { scope: "col" }, make("span", { class: "unseen" }, "Time")),
      ),
    ),
    make("tbody", {}, ...rows),
  );
  table.style.setProperty("--first-token", percent(firstTokenS));
  return table;
}

/**
 * @param {string} stage
 * @param {string} meaning
 * @param {HTMLElement} track
 * @param {string} time
 */
function row(stage, meaning, track, time) {
  return make(
    "tr",
    { title: meaning },
    make("th", { scope: "row" }, stage),
    make("td", {}, track),
    make("td", { class: "number" }, time),
  );
}
