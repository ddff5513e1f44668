/** @file The page: a conversation kept here, one request at a time, and the live view beside it. */

import { ChatError, chat } from "./api.js";
import { setUpCamera } from "./camera.js";
import { announce, byId } from "./dom.js";
import { PendingPictures } from "./pictures.js";
import { SettingsPanel } from "./settings.js";
import { SystemPanel } from "./system.js";
import { Turn } from "./turn.js";

/**
 * What `ui/config.json` says (see page/view.py).
 * @typedef {object} Config
 * @property {string} version
 * @property {{name: string, context_tokens: number, native_image_side: number, native_visual_tokens: number,
 *   max_images: number} | null} model null while it is not known
 * @property {string | null} jaeger_url
 */

const question = byId("question", HTMLTextAreaElement);
const composer = byId("composer", HTMLFormElement);
const send = byId("send", HTMLButtonElement);
const stop = byId("stop", HTMLButtonElement);
const turnList = byId("turns", HTMLOListElement);
const notice = byId("notice", HTMLElement);

const settings = new SettingsPanel();
const pending = new PendingPictures((text) => (notice.textContent = text), question);
const system = new SystemPanel(showHealth);

/** @type {Config} */
let config = { version: "", model: null, jaeger_url: null };
/** The finished turns, which the model sees again. @type {Turn[]} */
let turns = [];
/** Ends the request that runs, if one does. @type {AbortController | undefined} */
let running;

/** @param {boolean} ready */
async function showHealth(ready) {
  byId("health", HTMLElement).className = `dot ${ready ? "ready" : "missing"}`;
  if (ready && !config.model) await loadConfig();
  const name = config.model?.name;
  byId("model", HTMLElement).textContent = ready ? (name ?? "ready") : name ? `${name}: not ready` : "not ready";
}

async function loadConfig() {
  try {
    const response = await fetch("ui/config.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (response.ok) config = await response.json();
  } catch {
    return; // The next look at the system's health asks again.
  }
  byId("version", HTMLElement).textContent = `Triptych ${config.version}`;
  countRoom();
  const { model } = config;
  if (!model) return;
  // Resolutions are shares of the encoder's native side (inference.proto, ImageDetail).
  const shares = { high: 1, medium: 2 / 3, low: 1 / 2, thumbnail: 1 / 3 };
  for (const option of settings.detail.options) {
    const share = shares[/** @type {keyof typeof shares} */ (option.value)];
    const tokens = Math.round(Math.sqrt(model.native_visual_tokens) * share) ** 2;
    const name = option.value[0].toUpperCase() + option.value.slice(1);
    option.text = `${name}: ${Math.round(model.native_image_side * share)} px, ${tokens} tokens`;
  }
}

/** A request carries the chat's earlier pictures, too. */
function countRoom() {
  const sent = turns.reduce((count, turn) => count + turn.pictures.length, 0);
  pending.room = (config.model?.max_images ?? Infinity) - sent;
}

/**
 * The dialogue as the API wants it: pictures before the words that ask about them.
 * @param {Turn} last
 */
async function messages(last) {
  const list = [];
  for (const turn of [...turns, last]) {
    /** @type {object[]} */
    const parts = [];
    for (const picture of turn.pictures) {
      parts.push({ type: "image_url", image_url: { url: await picture.sent } });
    }
    if (turn.question) parts.push({ type: "text", text: turn.question });
    list.push({ role: "user", content: parts });
    if (turn !== last) list.push({ role: "assistant", content: turn.answer });
  }
  return list;
}

/**
 * Asks, and shows the answer as it comes.
 * @param {Turn} turn
 */
async function ask(turn) {
  const { detail, temperature, maxTokens, priority, key } = settings.values;
  const controller = new AbortController();
  running = controller;
  for (const earlier of turns) earlier.fold();
  document.body.classList.add("chatting");
  turnList.append(turn.item);
  showRunning(true);
  scrollDown(true);
  announce("Sent. Waiting for the answer.");
  /** @type {import("./api.js").Report} */
  const report = {};
  let finishReason = "";
  try {
    if (!config.model) await loadConfig();
    const request = {
      model: config.model?.name ?? "unknown",
      messages: await messages(turn),
      temperature,
      ...(maxTokens ? { max_completion_tokens: maxTokens } : {}),
      stream: true,
      stream_options: { include_usage: true },
      triptych: { priority, resolution: detail },
    };
    for await (const chunk of chat(request, { signal: controller.signal, key })) {
      const choice = chunk.choices?.[0];
      finishReason = choice?.finish_reason ?? finishReason;
      Object.assign(report, chunk.triptych);
      if (choice?.delta?.content) {
        const following = isAtBottom();
        turn.append(choice.delta.content);
        if (following) scrollDown();
      }
    }
    turn.finish(finishReason, report, config.jaeger_url ?? "");
    announce(`Answer: ${turn.answer}`);
    system.count(report.images ?? []);
  } catch (error) {
    if (controller.signal.aborted) {
      turn.stop();
      announce("Stopped.");
    } else {
      const failure = error instanceof ChatError ? error : new ChatError(String(error), { status: 500 });
      turn.fail(failure, () => retry(turn));
    }
  } finally {
    if (running === controller) {
      running = undefined;
      showRunning(false);
    }
  }
  // A new chat, begun meanwhile, has taken the item off the page.
  if (turn.answer && turn.item.isConnected) turns.push(turn);
  countRoom();
  scrollDown(true);
}

/** @param {Turn} turn */
function retry(turn) {
  if (running) return;
  turns = turns.filter((other) => other !== turn);
  turn.item.remove();
  question.focus();
  ask(new Turn(turn.question, turn.pictures));
}

/** @param {boolean} value */
function showRunning(value) {
  const focused = document.activeElement === stop || document.activeElement === send;
  send.hidden = value;
  stop.hidden = !value;
  if (focused) (value ? stop : question).focus();
}

function isAtBottom() {
  const { scrollHeight, scrollTop, clientHeight } = document.documentElement;
  return scrollHeight - scrollTop - clientHeight < 80;
}

/** @param {boolean} [always] even when the person has scrolled up */
function scrollDown(always = false) {
  if (always || isAtBottom()) scrollTo({ top: document.documentElement.scrollHeight });
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (running) return;
  if (!text && !pending.pictures.length) {
    notice.textContent = "Write a question or add a picture first.";
    question.focus();
    return;
  }
  notice.textContent = "";
  question.value = "";
  ask(new Turn(text, pending.take()));
});

question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  composer.requestSubmit();
});

question.addEventListener("input", () => (notice.textContent = ""));
stop.addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
});

byId("new-chat", HTMLButtonElement).addEventListener("click", () => {
  running?.abort();
  for (const picture of [...pending.take(), ...turns.flatMap((turn) => turn.pictures)])
    URL.revokeObjectURL(picture.shown);
  turns = [];
  turnList.replaceChildren();
  notice.textContent = "";
  document.body.classList.remove("chatting");
  countRoom();
  announce("New chat.");
  question.focus();
});

byId("sample", HTMLButtonElement).addEventListener("click", async () => {
  const response = await fetch("ui/picture.png");
  pending.add([new File([await response.blob()], "sample.png", { type: "image/png" })]);
  question.value = "where is the star?";
  question.focus();
});

setUpCamera((file) => {
  pending.add([file]);
  question.focus();
});
loadConfig();
question.focus();
