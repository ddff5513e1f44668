/** @file Says in words what the gateway says in codes. */

/** @typedef {import("./api.js").ChatError} ChatError */

/** @type {Record<string, string>} */
const SOURCES = {
  kv_cache: "found in the worker’s KV cache",
  encoder_cache: "found in the encoder cache",
  encoder: "encoded now",
  draft: "begun with a draft encoder",
};

/** What to do, by the `code` of an error (docs/errors.md). @type {Record<string, string>} */
const ADVICE = {
  too_many_images: "Start a new chat, or send fewer pictures.",
  image_too_large: "Send a smaller version of the picture.",
  images_too_large: "Send smaller or fewer pictures.",
  image_corrupt: "Open the picture, save it again, and send that.",
  image_unsupported: "Send a JPEG, PNG, WebP, BMP, TIFF or unanimated GIF.",
  images_unsupported: "This model takes no pictures: ask without one.",
  data_url_invalid: "Send a JPEG, PNG, WebP, BMP, TIFF or unanimated GIF.",
  context_length_exceeded: "Start a new chat, or choose less picture detail or a shorter answer in the settings.",
  text_too_long: "Shorten the text.",
  request_too_large: "Send smaller or fewer pictures, or start a new chat.",
  body_timeout: "The picture took too long to arrive. Send a smaller one, or try again.",
  sampling_invalid: "Change the temperature in the settings.",
  stopping_invalid: "Change the most tokens in the settings.",
  overloaded: "The system is full. Try again in a moment.",
  encoder_overloaded: "The encoder is full. Try again in a moment.",
  encoder_unavailable: "Triton does not answer. “triptych status” tells what is missing; then try again.",
  worker_unavailable: "The worker does not answer. “triptych status” tells what is missing; then try again.",
  service_unavailable: "The router does not answer. “triptych status” tells what is missing; then try again.",
  model_mismatch: "Encoder and worker serve different models. Export the encoder again from the worker’s checkpoint.",
  encode_timeout: "Try again, or choose less picture detail in the settings.",
  prefill_timeout: "Try again in a moment.",
  unreachable: "Check that “triptych up” still runs and that this device reaches it; then try again.",
  "broken-off": "Try again. If it happens often, the gateway’s log says why.",
};

/** Title and advice by HTTP status. @type {Record<number, [string, string]>} */
const STATUSES = {
  0: ["The gateway does not answer", ADVICE.unreachable],
  400: ["The request was refused", "Change it and try again."],
  401: ["This gateway wants an API key", "Enter it in the settings, then try again."],
  403: ["This key may not do that", "Enter another key in the settings."],
  404: ["This model is not served any more", "Reload the page to see which one is."],
  408: ["It took too long", "Try again in a moment."],
  413: ["That is too much at once", "Send smaller or fewer pictures."],
  429: ["Too many requests at once", "Try again in a moment."],
  500: ["Something went wrong inside", "Try again. If it stays, the services’ logs say why."],
  502: ["The gateway is not reached", "The proxy before it gave up. Try again in a moment."],
  503: ["The system is not ready", "Wait a few seconds and try again. “triptych status” tells what is missing."],
  504: ["It took too long", "Try again, or choose less picture detail in the settings."],
};

/**
 * Says where a picture's features came from.
 * @param {string} source
 */
export function sourceWords(source) {
  return SOURCES[source] ?? "left out";
}

/**
 * Says what failed, in the server's words where it had any, and what to do.
 * @param {ChatError} error
 * @returns {{title: string, message: string, advice: string}}
 */
export function failureWords(error) {
  const reason = error.reason.toLowerCase();
  const [title, byStatus] = STATUSES[error.status] ?? STATUSES[error.status >= 500 ? 500 : 400];
  const wait = error.retryAfterS ? ` Best after ${plural(Math.ceil(error.retryAfterS), "second")}.` : "";
  const broken = reason === "broken-off" || error.status === 200;
  return {
    title: broken ? "The answer broke off" : title,
    message: error.message,
    advice: (ADVICE[reason] ?? (broken ? ADVICE["broken-off"] : byStatus)) + wait,
  };
}

/**
 * "1 token", "2 tokens".
 * @param {number} count
 * @param {string} noun
 */
export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/**
 * A duration as a person reads it: "0.42 ms", "12.3 ms", "640 ms", "3.10 s".
 * @param {number} seconds
 */
export function duration(seconds) {
  const ms = seconds * 1000;
  if (ms >= 1000) return `${seconds.toFixed(2)} s`;
  return `${ms.toFixed(ms < 1 ? 2 : ms < 100 ? 1 : 0)} ms`;
}
