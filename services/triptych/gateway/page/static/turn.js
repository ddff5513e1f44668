/** @file One question and its answer, as they stand in the conversation. */

import { make, makeButton } from "./dom.js";
import { thumbnail } from "./pictures.js";
import { drawWaterfall } from "./waterfall.js";
import { duration, failureWords, plural, sourceWords } from "./words.js";

/** @typedef {import("./api.js").Report} Report */
/** @typedef {import("./api.js").ChatError} ChatError */
/** @typedef {import("./pictures.js").Picture} Picture */

/** A question with its answer. Owns its list item. */
export class Turn {
  /**
   * @param {string} question
   * @param {Picture[]} pictures
   */
  constructor(question, pictures) {
    this.question = question;
    this.pictures = pictures;
    this.answer = "";
    const asked = make("article", { class: "asked", "aria-label": "You" });
    if (pictures.length) asked.append(make("div", { class: "thumbnails" }, ...pictures.map(thumbnail)));
    if (question) asked.append(make("p", {}, question));
    this.text = document.createTextNode("");
    this.waiting = make("span", { class: "panels", "aria-hidden": "true" }, make("i"), make("i"), make("i"));
    this.paragraph = make("p", { class: "text" }, this.text, this.waiting);
    this.answered = make("article", { class: "answered", "aria-label": "Answer", "aria-busy": "true" }, this.paragraph);
    this.item = make("li", {}, asked, this.answered);
  }

  /** @param {string} piece */
  append(piece) {
    this.answer += piece;
    this.text.appendData(piece);
    this.waiting.classList.add("writing");
  }

  /** Ends the answer where it is, because the person said so. */
  stop() {
    this.#end();
    this.#note(this.answer ? "Stopped." : "Stopped before the first word.");
  }

  /**
   * Ends the answer with what the gateway said about it.
   * @param {string} finishReason
   * @param {Report} report
   * @param {string} jaegerUrl where traces are shown; empty: nowhere
   */
  finish(finishReason, report, jaegerUrl) {
    this.#end();
    if (!this.answer) this.#note("The model answered with nothing.");
    if (finishReason === "length") {
      this.#note("Cut off at the most tokens allowed. The settings raise it; “go on” continues.");
    }
    for (const { explanation } of report.degradations ?? []) this.#note(`Not as asked: ${explanation}`, "degraded");
    if (report.visual_kv?.lossy) {
      this.#note(`Visual KV was compressed (${report.visual_kv.policy}): the answer may differ for it.`, "degraded");
    }
    this.#drawReport(report, jaegerUrl);
  }

  /**
   * Ends the answer with a failure.
   * @param {ChatError} error
   * @param {() => void} retry
   */
  fail(error, retry) {
    this.#end();
    const { title, message, advice } = failureWords(error);
    this.answered.append(
      make(
        "div",
        { class: "failure", role: "alert" },
        make("p", {}, make("strong", {}, title)),
        ...(message ? [make("p", { class: "said" }, message)] : []),
        make("p", {}, advice),
        makeButton("Try again", retry),
      ),
    );
  }

  /** Closes the report, so that only the newest is open. */
  fold() {
    for (const details of this.answered.querySelectorAll("details")) details.open = false;
  }

  #end() {
    this.waiting.remove();
    if (!this.answer) this.paragraph.remove();
    this.answered.removeAttribute("aria-busy");
  }

  /**
   * @param {string} text
   * @param {string} [kind]
   */
  #note(text, kind = "") {
    this.answered.append(make("p", { class: `note ${kind}` }, text));
  }

  /**
   * @param {Report} report
   * @param {string} jaegerUrl
   */
  #drawReport({ timings, usage, images = [], trace_id, request_id }, jaegerUrl) {
    if (!timings) return;
    const details = make("details", { class: "report", open: "" }, make("summary", {}, summary(timings)));
    const cached = images.length > 0 && images.every(({ source }) => source !== "encoder" && source in SEEN);
    details.append(drawWaterfall(timings, cached));
    const facts = make("dl", { class: "facts" });
    if (usage) {
      const prompt = `${usage.visual_tokens.toLocaleString("en")} visual + ${plural(usage.text_tokens, "text token")}`;
      facts.append(make("dt", {}, "Prompt"), make("dd", {}, `${prompt}, ${usage.cached_tokens} of them cached`));
      const rate = timings.decode && usage.output_tokens > 1 ? (usage.output_tokens - 1) / timings.decode : 0;
      const speed = rate ? `, ${rate.toFixed(rate < 10 ? 1 : 0)} per second` : "";
      facts.append(make("dt", {}, "Answer"), make("dd", {}, plural(usage.output_tokens, "token") + speed));
    }
    for (const [index, image] of images.entries()) {
      const label = images.length > 1 ? `Picture ${index + 1}` : "Picture";
      const seen = `seen at ${image.encoded_side} × ${image.encoded_side} px as ${plural(image.visual_tokens, "token")}`;
      facts.append(make("dt", {}, label), make("dd", {}, `${sourceWords(image.source)}; ${seen}`));
    }
    if (trace_id && jaegerUrl) {
      const link = { href: `${jaegerUrl}/trace/${encodeURIComponent(trace_id)}`, target: "_blank", rel: "noreferrer" };
      facts.append(make("dt", {}, "Trace"), make("dd", {}, make("a", link, "open in Jaeger")));
    } else if (request_id) {
      facts.append(make("dt", {}, "Trace"), make("dd", {}, make("code", {}, `triptych trace ${request_id}`)));
    }
    details.append(facts);
    this.answered.append(details);
  }
}

/** Sources that say an image was seen at all. */
const SEEN = { kv_cache: true, encoder_cache: true, encoder: true };

/** @param {Record<string, number>} timings */
function summary({ time_to_first_token, total }) {
  const parts = [];
  if (time_to_first_token !== undefined) parts.push(`first token after ${duration(time_to_first_token)}`);
  if (total !== undefined) parts.push(`all after ${duration(total)}`);
  const text = parts.join(", ") || "where the time went";
  return text[0].toUpperCase() + text.slice(1);
}
