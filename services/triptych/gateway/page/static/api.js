/** @file Speaks to the gateway: `POST /v1/chat/completions` as a stream of server-sent events. */

/**
 * What the gateway says about an answer, in the `triptych` namespace of its chunks (see page/__init__.py).
 * @typedef {object} Report
 * @property {string} [request_id]
 * @property {string} [trace_id]
 * @property {ImageReport[]} [images]
 * @property {Record<string, number>} [timings] seconds per stage
 * @property {Usage} [usage]
 * @property {{kind: string, explanation: string}[]} [degradations]
 * @property {{policy: string, lossy: boolean, saved_bytes: number}} [visual_kv]
 *
 * @typedef {{width: number, height: number, encoded_side: number, visual_tokens: number, source: string}} ImageReport
 *
 * @typedef {{text_tokens: number, visual_tokens: number, cached_tokens: number, output_tokens: number}} Usage
 *
 * @typedef {object} Chunk one event of the stream
 * @property {{delta?: {content?: string | null}, finish_reason?: string | null}[]} [choices]
 * @property {Report} [triptych]
 * @property {{message?: string, code?: string | number | null, type?: string}} [error]
 */

/** An answer that did not come, or broke off. */
export class ChatError extends Error {
  /**
   * @param {string} message the server's own words; may be empty
   * @param {{status?: number, reason?: string, retryAfterS?: number}} [facts] `status` 0: the gateway did not answer
   */
  constructor(message, { status = 0, reason = "", retryAfterS } = {}) {
    super(message);
    this.status = status;
    this.reason = reason;
    this.retryAfterS = retryAfterS;
  }
}

/**
 * Asks, and yields the answer's chunks until the server says it is done.
 * @param {object} request the body
 * @param {{signal: AbortSignal, key: string}} options aborting the signal ends the request and throws its reason
 * @returns {AsyncGenerator<Chunk, void>}
 * @throws {ChatError} when the gateway refuses, fails, or the connection is lost
 */
export async function* chat(request, { signal, key }) {
  /** @type {Record<string, string>} */
  const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await orLost(
    fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(request), signal }),
    signal,
    "unreachable",
  );
  if (!response.ok || !response.body) throw await refusal(response);
  const events = serverSentEvents(response.body);
  try {
    for (;;) {
      const { value, done } = await orLost(events.next(), signal, "broken-off");
      if (done) break;
      if (value === "[DONE]") return;
      const chunk = /** @type {Chunk} */ (JSON.parse(value));
      if (chunk.error) {
        const { message = "", code, type } = chunk.error;
        throw new ChatError(message, { status: response.status, reason: String(code ?? type ?? "") });
      }
      yield chunk;
    }
  } finally {
    await events.return().catch(() => {});
  }
  throw new ChatError("", { reason: "broken-off" });
}

/**
 * Yields the data of each event of a stream, as the HTML standard reads it; names, ids and comments are passed over.
 * @param {ReadableStream<Uint8Array<ArrayBuffer>>} body
 * @returns {AsyncGenerator<string, void>}
 */
export async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  /** @type {string[]} */
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      // A carriage return at the very end may be the first half of a line break.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/**
 * @template T
 * @param {Promise<T>} promise
 * @param {AbortSignal} signal
 * @param {string} reason
 * @returns {Promise<T>}
 */
async function orLost(promise, signal, reason) {
  try {
    return await promise;
  } catch (error) {
    if (signal.aborted) throw signal.reason;
    throw error instanceof ChatError ? error : new ChatError("", { reason });
  }
}

/**
 * @param {Response} response
 * @returns {Promise<ChatError>}
 */
async function refusal(response) {
  const seconds = Number(response.headers.get("Retry-After") ?? NaN);
  const facts = { status: response.status, retryAfterS: Number.isFinite(seconds) ? seconds : undefined };
  try {
    const { error } = await response.json();
    return new ChatError(String(error.message ?? ""), { ...facts, reason: String(error.code ?? error.type ?? "") });
  } catch {
    return new ChatError("", facts);
  }
}
