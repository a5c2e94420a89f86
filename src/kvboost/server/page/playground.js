// The playground: sends a prompt, shows the answer as it comes, what was reused, and how long it took.
// Asks what would be reused before it sends; the answer's own account replaces that forecast.

import { Comparison } from "./comparison.js";
import { EXAMPLE, withOtherQuestion, withOtherWord } from "./example.js";
import { byId, milliseconds, number, plural, visible } from "./format.js";
import { withText } from "./origins.js";
import { PromptView } from "./prompt_view.js";

const NO_KEY = "This server wants an API key. Enter it under “API key” and send again.";
const WRONG_KEY = "The server does not know this API key. Correct it and send again.";

export class Playground {
  #api;
  #afterwards; // called when an answer is through
  #comparison = new Comparison();
  #view = new PromptView();
  #running = null; // the AbortController of what runs

  constructor(api, afterwards) {
    this.#api = api;
    this.#afterwards = afterwards;
    if (!byId("prompt").value) byId("prompt").value = EXAMPLE;
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start((signal) => this.#send(signal));
    });
    byId("form").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
    });
    byId("form").addEventListener("input", () => this.#showSends());
    byId("explain").addEventListener("click", () => this.#start((signal) => this.#explainOnly(signal)));
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("try-question").addEventListener("click", () => this.#change(withOtherQuestion));
    byId("try-word").addEventListener("click", () => this.#change(withOtherWord));
    byId("try-example").addEventListener("click", () => this.#change(() => EXAMPLE));
  }

  #change(how) {
    byId("prompt").value = how(byId("prompt").value);
    this.#showSends();
  }

  #showSends() {
    this.#comparison.show(promptKey(asked()));
  }

  // One thing at a time; errors become text under the button.
  async #start(work) {
    if (this.#running) return;
    const wrong = mistake();
    this.#error(wrong?.text ?? "");
    if (wrong) {
      byId(wrong.field).focus();
      return;
    }
    this.#running = new AbortController();
    this.#busy(true);
    try {
      await work(this.#running.signal);
    } catch (error) {
      if (error.name === "AbortError") byId("answer-facts").textContent = "Stopped.";
      else if (error.status === 401) this.#error(this.#api.key ? WRONG_KEY : NO_KEY);
      else this.#error(error.message);
    } finally {
      this.#running = null;
      this.#busy(false);
      this.#afterwards();
    }
  }

  #busy(isBusy) {
    // Not disabled for good: that would take the focus away.
    for (const id of ["send", "explain"]) byId(id).setAttribute("aria-disabled", String(isBusy));
    byId("send").textContent = isBusy ? "Sending" : "Send";
    const stop = byId("stop");
    if (!isBusy && document.activeElement === stop) byId("send").focus();
    stop.hidden = !isBusy;
    byId("answer").setAttribute("aria-busy", String(isBusy));
  }

  #error(text) {
    byId("error").hidden = !text;
    byId("error").textContent = text;
  }

  async #explainOnly(signal) {
    await this.#forecast(asked(), signal);
  }

  async #forecast(prompt, signal) {
    const told = await this.#api.post("v1/cache/explain", { ...prompt.input, ...prompt.salt }, signal);
    const spans = told.spans.map((span) => ({ ...span, estimated: false }));
    this.#view.show(spans, `${ofTokens(told)} would be reused`, told.choice);
    return told;
  }

  async #send(signal) {
    const prompt = asked();
    byId("answer").textContent = "";
    byId("answer-empty").hidden = true;
    byId("answer-facts").textContent = "Waiting for the first token";
    let told = { spans: [] };
    try {
      told = await this.#forecast(prompt, signal);
    } catch (error) {
      if (error.status !== 403 && error.status !== 404) throw error; // the answer does not depend on it
    }
    const answer = await this.#answer(prompt, signal);
    this.#showAccount(prompt, told, answer);
  }

  // Streams the answer into the page; returns its account and the time to its first text.
  async #answer(prompt, signal) {
    const body = {
      model: await this.#api.model(),
      ...prompt.input,
      ...prompt.salt,
      ...prompt.limit,
      temperature: Number(byId("temperature").value),
      stream_options: { include_usage: true },
    };
    const answer = { seen_ms: null, total_ms: null, finish: null, usage: null, kvboost: null };
    const started = performance.now();
    for await (const chunk of this.#api.stream(prompt.route, body, signal)) {
      const choice = chunk.choices?.[0];
      const text = choice?.delta?.content ?? choice?.text ?? "";
      if (text && answer.seen_ms === null) {
        answer.seen_ms = performance.now() - started;
        byId("answer-facts").textContent = `First token after ${milliseconds(answer.seen_ms)}`;
      }
      if (text) byId("answer").append(visible(text));
      answer.finish = choice?.finish_reason ?? answer.finish;
      answer.usage = chunk.usage ?? answer.usage;
      answer.kvboost = chunk.kvboost ?? answer.kvboost;
    }
    answer.total_ms = performance.now() - started;
    answer.seen_ms ??= answer.total_ms; // an answer without text
    return answer;
  }

  #showAccount(prompt, told, { seen_ms, total_ms, finish, usage, kvboost }) {
    if (!byId("answer").textContent) byId("answer").textContent = "(The answer is empty.)";
    const facts = [
      plural(usage.completion_tokens, "token"),
      `first after ${milliseconds(seen_ms)}`,
      `all after ${milliseconds(total_ms)}`,
      finish === "length" ? "cut at max tokens" : "complete",
    ];
    byId("answer-facts").textContent = facts.join(" · ");
    const counts = { prompt_tokens: usage.prompt_tokens, cached_tokens: kvboost.cached_tokens };
    const choice = told.cached_tokens === counts.cached_tokens ? told.choice : ""; // else it was not made
    this.#view.show(withText(kvboost.spans, told.spans), verdict(counts, kvboost), choice);
    this.#comparison.add(promptKey(prompt), { ...counts, seen_ms, server_ms: kvboost.ttft_ms });
  }
}

// What the form asks for, as both routes want it.
function asked() {
  const system = byId("system").value;
  const text = byId("prompt").value;
  const salt = byId("salt").value ? { cache_salt: byId("salt").value } : {};
  const most = Number(byId("max-tokens").value);
  if (document.querySelector("input[name=route]:checked").value === "completion") {
    const prompt = system ? `${system}\n\n${text}` : text;
    return { route: "v1/completions", input: { prompt }, limit: { max_tokens: most }, salt };
  }
  const messages = [{ role: "user", content: text }];
  if (system) messages.unshift({ role: "system", content: system });
  return { route: "v1/chat/completions", input: { messages }, limit: { max_completion_tokens: most }, salt };
}

// Sends with the same key are compared; how long the answer may be changes nothing about its first token.
function promptKey({ input, salt }) {
  return JSON.stringify([input, salt]);
}

// What is wrong with the form, in words, and where.
function mistake() {
  if (!byId("prompt").value) return { field: "prompt", text: "Write a prompt first." };
  if (!byId("max-tokens").checkValidity())
    return { field: "max-tokens", text: "Max tokens is a whole number from 1." };
  if (!byId("temperature").checkValidity())
    return { field: "temperature", text: "Temperature is a number from 0 to 2." };
  return null;
}

// What is found and computed again all the same is not called reused.
function verdict(counts, { recomputed_tokens }) {
  if (!recomputed_tokens) return `${ofTokens(counts)} reused`;
  return `${ofTokens(counts)} found, ${number(recomputed_tokens)} computed again`;
}

function ofTokens({ cached_tokens, prompt_tokens }) {
  return `${number(cached_tokens)} of ${plural(prompt_tokens, "token")}`;
}
