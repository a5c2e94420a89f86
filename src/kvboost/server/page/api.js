// The server's routes: requests with the key, errors as text, streamed answers chunk by chunk.
// Knows HTTP and JSON, nothing of the page. Paths are relative, so it works behind a prefix too.

const KEY = "kvboost.key";

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  #key = "";
  #model = null;

  constructor() {
    try {
      this.#key = sessionStorage.getItem(KEY) ?? "";
    } catch {
      // storage is switched off: the key holds until the page is left
    }
  }

  get key() {
    return this.#key;
  }

  set key(key) {
    this.#key = key;
    this.#model = null;
    try {
      if (key) sessionStorage.setItem(KEY, key);
      else sessionStorage.removeItem(KEY);
    } catch {
      // as above
    }
  }

  // The name that requests must give; asked for once.
  async model() {
    if (this.#model === null) {
      const models = await this.get("v1/models");
      this.#model = models.data[0].id;
    }
    return this.#model;
  }

  async get(path, signal) {
    return (await this.#fetch(path, { signal })).json();
  }

  async post(path, body, signal) {
    return (await this.#fetch(path, this.#posted(body, signal))).json();
  }

  // The JSON chunks of a streamed answer, in order.
  async *stream(path, body, signal) {
    const response = await this.#fetch(path, this.#posted({ ...body, stream: true }, signal));
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(response.status, chunk.error.message);
      yield chunk;
    }
    throw new ServerError(response.status, "The connection ended before the answer did.");
  }

  #posted(body, signal) {
    return {
      method: "POST",
      body: JSON.stringify(body),
      headers: { "Content-Type": "application/json" },
      signal,
    };
  }

  async #fetch(path, options) {
    const headers = { Accept: "application/json", ...options.headers };
    if (/[^\x21-\x7e]/.test(this.#key))
      throw new ServerError(401, "An API key has no spaces and ASCII signs only.");
    if (this.#key) headers.Authorization = `Bearer ${this.#key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
    } catch (error) {
      if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
      throw new ServerError(0, "The server does not answer. Is it running?");
    }
    if (!response.ok) throw new ServerError(response.status, await explained(response));
    return response;
  }
}

// What went wrong, in the server's words where it has some.
async function explained(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    message = `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  }
  if (response.status === 429) {
    const seconds = response.headers.get("Retry-After");
    if (seconds) message += ` (${seconds} s)`;
  }
  return message;
}

// The data of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
